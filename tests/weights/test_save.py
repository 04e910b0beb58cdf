"""`chunkc.save`: files that others read as they stand, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from built_modules import Tied, encoder
from harness import array, differences
from torch import nn

import chunkc


def values(model: nn.Module) -> dict[str, object]:
    return {name: array(tensor) for name, tensor in model.state_dict().items()}


def read(directory: Path) -> dict[str, object]:
    """All tensors that an index, or the one file, names."""
    index = directory / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return {k: array(v) for name in names for k, v in safetensors.torch.load_file(directory / name).items()}


@pytest.mark.parametrize("home", ["none", "cpu", "disk"])
def test_the_library_reads_what_was_saved(tmp_path: Path, home: str) -> None:
    model = encoder() if home == "none" else chunkc.place(encoder(), home=home, chunk_size="16KiB")
    chunkc.save(model, tmp_path / "one.safetensors")
    found = safetensors.torch.load_file(tmp_path / "one.safetensors")
    assert not differences({k: array(v) for k, v in found.items()}, values(model))
    with safetensors.safe_open(tmp_path / "one.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in tmp_path.iterdir()] == ["one.safetensors"]


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.bool, torch.complex64,
]  # fmt: skip


def test_every_dtype_and_layout(tmp_path: Path) -> None:
    model = nn.Module()
    for dtype in DTYPES:
        model.register_buffer(f"of_{dtype}".replace(".", "_"), torch.tensor([[1, 0, 1]]).to(dtype))
    model.register_buffer("scalar", torch.tensor(3.5))
    model.register_buffer("empty", torch.empty(0, 4))
    model.register_buffer("strided", torch.randn(4, 6).t())
    model.register_buffer("part", torch.randn(8, 8)[2:5, 1:4])
    chunkc.save(model, tmp_path)
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    state = model.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (state[name].dtype, state[name].shape)
        assert bytes(tensor.view(-1).view(torch.uint8)) == bytes(state[name].contiguous().view(-1).view(torch.uint8))


def test_shards_and_their_index(tmp_path: Path) -> None:
    model = encoder()
    chunkc.save(model, tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert index["metadata"] == {"total_size": total}
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 1
    assert names == [f"model-{i + 1:05}-of-{len(names):05}.safetensors" for i in range(len(names))]
    assert not differences(read(tmp_path), values(model))
    largest = max(tensor.nbytes for tensor in model.state_dict().values())
    assert all((tmp_path / name).stat().st_size < max(largest, 100_000) + 10_000 for name in names)
    fresh = encoder()
    chunkc.load(fresh, tmp_path)
    assert not differences(values(fresh), values(model))


def test_a_shared_weight_is_written_once(tmp_path: Path) -> None:
    model = Tied()
    chunkc.save(model, tmp_path)
    assert "head.weight" not in read(tmp_path)
    model._tied_weights_keys = {"embedding.weight": "head.weight"}  # as transformers says which name goes
    chunkc.save(model, tmp_path)
    assert "embedding.weight" not in read(tmp_path)
    fresh = Tied()
    chunkc.load(fresh, tmp_path)
    assert not differences(values(fresh), values(model))


def test_names_are_the_modules_own(tmp_path: Path) -> None:
    model = encoder()
    names = set(model.state_dict())
    model.layers[1] = torch.compile(model.layers[1])
    chunkc.save(torch.compile(model), tmp_path)
    assert set(read(tmp_path)) == names


@pytest.mark.parametrize("before", ["5GB", "50KB", "100KB"])
@pytest.mark.parametrize("after", ["5GB", "50KB", "100KB"])
def test_saving_again_leaves_no_former_file(tmp_path: Path, before: str, after: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    chunkc.save(encoder(), tmp_path, max_shard_size=before)
    model = encoder()
    chunkc.save(model, tmp_path, max_shard_size=after)
    assert not differences(read(tmp_path), values(model))
    index = tmp_path / "model.safetensors.index.json"
    named = (
        {index.name, *json.loads(index.read_text())["weight_map"].values()} if index.exists() else {"model.safetensors"}
    )
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", *named}


@pytest.mark.parametrize("size", ["5GB", "50KB"])
@pytest.mark.parametrize(
    ("at", "is_killed"),
    [
        *((at, False) for at in range(1, 12)),
        *(pytest.param(at, True, marks=pytest.mark.slow) for at in range(1, 30, 3)),
    ],
)
def test_an_error_or_a_kill_at_any_moment_leaves_one_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str, at: int, is_killed: bool
) -> None:
    former, model = encoder(), encoder()
    chunkc.save(former, tmp_path, max_shard_size=size)
    calls = 0

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **keywords: object) -> object:
            nonlocal calls
            calls += 1
            if calls == at:
                if is_killed:
                    os._exit(1)
                raise OSError(28, "No space left on device")
            return real(*args, **keywords)

        return call

    def save() -> bool:
        with monkeypatch.context() as patch:
            unlinking = [(Path, "unlink")] if is_killed else []
            for owner, name in ((os, "posix_fallocate"), (os, "fsync"), (Path, "replace"), *unlinking):
                patch.setattr(owner, name, failing(getattr(owner, name)))
            try:
                chunkc.save(model, tmp_path, max_shard_size=size)
            except chunkc.FileError:
                return True
        return False

    if not is_killed:
        assert save() == (calls >= at)
        assert not [path for path in tmp_path.iterdir() if path.suffix == ".saving"]
    elif (child := os.fork()) == 0:
        save()
        os._exit(0)
    else:
        assert os.waitpid(child, 0)[1] in (0, 256)
    found = encoder()
    chunkc.load(found, tmp_path)
    assert not differences(values(found), values(former)) or not differences(values(found), values(model))


def test_what_cannot_be_stored_is_named_before_anything_is_written(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> object:
            return {"version": 1}

        def set_extra_state(self, state: object) -> None: ...

    with pytest.raises(chunkc.UnsupportedError, match=r"0\._extra_state is a dict"):
        chunkc.save(nn.Sequential(Extra(2, 2)), tmp_path / "new")
    with pytest.raises(chunkc.UnsupportedError, match="weight has no memory"):
        chunkc.save(nn.Linear(2, 2, device="meta"), tmp_path / "new")
    with pytest.raises(chunkc.OptionsError, match="max_shard_size"):
        chunkc.save(nn.Linear(2, 2), tmp_path / "new", max_shard_size="many")
    with pytest.raises(chunkc.OptionsError, match="max_shard_size"):
        chunkc.save(nn.Linear(2, 2), tmp_path / "new", max_shard_size=0)
    assert not (tmp_path / "new").exists()


def test_a_directory_that_cannot_be_written() -> None:
    if not os.path.isdir("/proc/sys"):
        pytest.skip("needs /proc")
    with pytest.raises(chunkc.FileError, match="cannot save to /proc/sys"):
        chunkc.save(nn.Linear(2, 2), "/proc/sys")


@pytest.mark.second_tier
@pytest.mark.parametrize("size", ["5GB", "100KB"])
def test_transformers_reads_it_as_it_stands(tmp_path: Path, size: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128)
    with chunkc.init():
        model = transformers.GPT2LMHeadModel(config).bfloat16()
    for _ in range(2):  # the second one finds files there
        chunkc.save(model, tmp_path, max_shard_size=size)
        found, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(said.values())
        assert type(found) is type(model)
        assert found.dtype == torch.bfloat16
        assert found.lm_head.weight is found.transformer.wte.weight
        assert not differences(values(found), values(model))
    names = json.loads((tmp_path / "config.json").read_text())
    assert names["architectures"] == ["GPT2LMHeadModel"]
