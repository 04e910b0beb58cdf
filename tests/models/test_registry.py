"""The built-in models by name: published sizes, nothing allocated, clear errors."""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from chunkc.ir.errors import OptionsError
from chunkc.models import MODELS, find_model, num_parameters

EXACT = {
    # As counted in the checkpoints that their authors, torchvision or Hugging Face publish.
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "vit-base-32": 88_224_232,
    "vit-large": 304_326_632,
    "vit-large-32": 306_535_400,
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
}
ROUNDED = {
    # (billions as published, tolerance): the papers round, and the family's names leave the embedding out.
    "palm-8b": (8.63, 0.001),
    "t-nlg-17b": (17.17, 0.002),
    "gpt-1b": (1, 0.12),
    "gpt-2b": (2, 0.07),
    "gpt-4b": (4, 0.07),
    "gpt-6b": (6, 0.07),
    "gpt-8b": (8, 0.07),
    "gpt-10b": (10, 0.07),
    "gpt-12b": (12, 0.07),
    "gpt-15b": (15, 0.07),
    "gpt-18b": (18, 0.07),
    "gpt-20b": (20, 0.07),
    "gpt-30b": (30, 0.07),
    "gpt-40b": (40, 0.07),
    "gpt-60b": (60, 0.07),
    "gpt-68b": (68, 0.07),
    "gpt-175b": (174.6, 0.0001),
}


ONE_OF_EACH = ["gpt2-small", "bert-base", "vit-base-32", "palm-8b", "llama3-8b", "mixtral-8x7b"]


def count(name: str) -> int:
    with torch.device("meta"):
        return num_parameters(MODELS[name].build())


def test_every_model_has_a_published_size() -> None:
    assert set(MODELS) == set(EXACT) | set(ROUNDED)
    assert all(spec.name == name for name, spec in MODELS.items())


@pytest.mark.parametrize("name", EXACT)
def test_sizes_are_exactly_the_published(name: str) -> None:
    assert count(name) == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_sizes_are_about_the_published(name: str) -> None:
    billions, tolerance = ROUNDED[name]
    assert count(name) == pytest.approx(billions * 1e9, rel=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_the_names_are_for_people(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9-]+", name)


def test_the_largest_takes_no_memory() -> None:
    spec = MODELS["gpt-175b"]
    tracemalloc.start()
    with torch.device("meta"):
        model, (args, kwargs) = spec.build(activation_checkpointing=True), spec.example(2)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [tuple(arg.shape) for arg in args] == [(2, 1024), (2, 1024)]
    assert kwargs == {}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_fake_tensor_mode_does_too(name: str) -> None:
    spec = MODELS[name]
    with FakeTensorMode() as mode:
        model = replace(spec.config, num_layers=2, activation_checkpointing=True).module()
        args, kwargs = spec.example(2)
        loss = model(*args, **kwargs)
    assert all(parameter.fake_mode is mode for parameter in model.parameters())
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert args[0].shape[0] == 2


@pytest.mark.parametrize("name", ["bert-base", "vit-base-32", "llama3-8b"])
def test_examples_are_valid_and_the_same_every_time(name: str) -> None:
    spec = MODELS[name]
    (first, labels), _ = spec.example(3)
    (again, _), _ = spec.example(3)
    assert torch.equal(first, again)
    assert first.dtype == (torch.bfloat16 if spec.seq_len is None else torch.int64)
    assert labels.dtype == torch.int64
    assert labels.min() >= 0
    assert labels.max() < (1000 if spec.seq_len is None else spec.config.vocabulary)  # type: ignore[attr-defined]
    assert labels.unique().numel() > 2


def test_dtype_reaches_every_parameter_and_the_images() -> None:
    for name in ONE_OF_EACH:
        dtype = MODELS[name].config.only_dtype or torch.float16
        with torch.device("meta"):
            model = MODELS[name].build(dtype=dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}, name
        assert not list(model.buffers()), name
    (images, _), _ = MODELS["vit-base-32"].example(1, dtype=torch.float32)
    assert images.dtype == torch.float32


@pytest.mark.parametrize("name", ["gpt2-small", "bert-base"])
def test_a_table_of_positions_grows_and_never_shrinks(name: str) -> None:
    spec = MODELS[name]
    with torch.device("meta"):
        rows = [spec.build(seq_len=n).positions.weight.shape[0] for n in (8, 4096)]
    assert rows == [spec.config.max_length, 4096]  # type: ignore[attr-defined]


def test_any_length_does_for_rotary_positions() -> None:
    with torch.device("meta"):
        assert num_parameters(MODELS["llama3-8b"].build(seq_len=100_000)) == EXACT["llama3-8b"]


@pytest.mark.parametrize("written", ["gpt-18b", "GPT-18B", "gpt_18b", "gpt18b", " GPT 18B "])
def test_spelling_is_forgiven(written: str) -> None:
    assert find_model(written) is MODELS["gpt-18b"]


def test_names_differ_by_more_than_spelling() -> None:
    assert len({re.sub("[^a-z0-9]", "", name) for name in MODELS}) == len(MODELS)


@pytest.mark.parametrize(
    ("written", "named"),
    [("gpt-19b", "'gpt-18b'"), ("lama3-8b", "'llama3-8b'"), ("gpt2", "'gpt2-xl'"), ("mixtral", "'mixtral-8x7b'")],
)
def test_a_near_miss_names_the_nearest(written: str, named: str) -> None:
    with pytest.raises(OptionsError) as caught:
        find_model(written)
    message = str(caught.value)
    assert repr(written) in message
    assert named in message
    assert "\n" not in message


@pytest.mark.parametrize("written", ["zzz", ""])
def test_a_wild_miss_names_all(written: str) -> None:
    with pytest.raises(OptionsError) as caught:
        find_model(written)
    assert all(name in str(caught.value) for name in MODELS)
    assert "\n" not in str(caught.value)


def test_sizes_that_make_no_sense_are_refused() -> None:
    gpt, vit = MODELS["gpt2-small"], MODELS["vit-base-32"]
    with pytest.raises(OptionsError, match="batch_size is 0"):
        gpt.example(0)
    with pytest.raises(OptionsError, match="seq_len is -1"):
        gpt.example(1, -1)
    with pytest.raises(OptionsError, match="seq_len is 0"):
        gpt.build(seq_len=0)
    with pytest.raises(OptionsError, match="has no sequence length"):
        vit.example(1, 50)
    with pytest.raises(OptionsError, match="has no sequence length"):
        vit.build(seq_len=50)
    with pytest.raises(OptionsError, match=r"torch\.int64"):
        gpt.build(dtype=torch.int64)
    with pytest.raises(OptionsError, match=r"mixtral-8x7b cannot be built in torch\.float16"):
        MODELS["mixtral-8x7b"].build(dtype=torch.float16)
