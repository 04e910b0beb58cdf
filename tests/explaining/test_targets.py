"""What `chunkc explain` can be asked about: built-in models, factories in files, classes of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import chunkc
from chunkc.explaining.targets import ModelOptions, Subject, built_in, from_file, from_module
from chunkc.ir.errors import OptionsError
from chunkc.models import MODELS

PLAIN = ModelOptions()

HEAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, scale=1.0):
        return (self.linear(x) * scale).sum()

"""


def explain(subject: Subject) -> chunkc.Explanation:
    return chunkc.explain(subject.model, *subject.args, memory_budget="1GiB", **subject.kwargs)


@pytest.fixture
def file(tmp_path: Path) -> Any:
    """Writes a file with a model `Net` and more code; returns `PATH:build`."""

    def write(code: str, name: str = "train.py") -> str:
        (tmp_path / name).write_text(HEAD + code)
        return f"{tmp_path / name}:build"

    return write


# --- built-in models ---


def test_built_in_models_have_no_memory() -> None:
    subject = built_in("gpt-175b", PLAIN).build(None, None)
    assert all(isinstance(tensor, FakeTensor) for tensor in (*subject.model.parameters(), *subject.args))
    assert sum(parameter.numel() for parameter in subject.model.parameters()) > 170e9


def test_sizes_and_options_of_built_in_models() -> None:
    options = ModelOptions(torch.float32, activation_checkpointing=True)
    subject = built_in("GPT2 small", options).build(3, 64)
    assert subject.args[0].shape == (3, 64)
    assert {parameter.dtype for parameter in subject.model.parameters()} == {torch.float32}
    default = built_in("gpt2-small", PLAIN).build(None, None)
    spec = MODELS["gpt2-small"]
    assert default.args[0].shape == (spec.batch_size, spec.seq_len)


@pytest.mark.parametrize(
    ("name", "sizes", "match"),
    [
        ("gpt-19b", (None, None), "no built-in model is called 'gpt-19b'; did you mean"),
        ("gpt-18", (None, None), r"no built-in model is called 'gpt-18'; did you mean 'gpt-18b'\?"),
        ("gpt2", (None, None), "no built-in model is called 'gpt2'; did you mean 'gpt2-small' or 'gpt2-medium' or"),
        ("nothing like it", (None, None), "built in are gpt2-small"),
        ("vit-base-32", (None, 128), "has no sequence length"),
    ],
)
def test_mistakes_with_built_in_models(name: str, sizes: tuple[None, int | None], match: str) -> None:
    with pytest.raises(OptionsError, match=match):
        built_in(name, PLAIN).build(*sizes)


# --- factories in files ---


@pytest.mark.parametrize(
    "body",
    [
        "return Net(), (torch.ones(2, 8),)",
        "return Net(), torch.ones(2, 8)",
        "return Net(), (), {'x': torch.ones(2, 8)}",
        "return Net(), (torch.ones(2, 8),), {'scale': 2.0}",
        "with torch.device('meta'):\n        return Net(), (torch.ones(2, 8),)",
        "return Net().bfloat16(), torch.ones(2, 8, dtype=torch.bfloat16)",
        "return Net().to('cpu'), torch.ones(2, 8).to('cpu')",
        "return __import__('copy').deepcopy(Net()), (torch.ones(2, 8),)",
    ],
    ids=["args", "one tensor", "kwargs", "both", "meta", "converted", "moved", "a copy"],
)
def test_factories(file: Any, body: str) -> None:
    text = file(f"def build():\n    {body}\n")
    target = from_file(text, PLAIN)
    assert target.name == text
    explanation = explain(target.build(None, None))
    assert (explanation.num_parameters, explanation.fits) == (72, True)


def test_a_factory_gets_what_it_has_parameters_for(file: Any) -> None:
    text = file(
        "def build(batch_size=2, seq_len=8, dtype=torch.float32, activation_checkpointing=False):\n"
        "    assert activation_checkpointing\n"
        "    return Net(seq_len), torch.ones(batch_size, seq_len, dtype=dtype)\n"
    )
    subject = from_file(text, ModelOptions(torch.bfloat16, True)).build(5, 16)
    assert (subject.args[0].shape, subject.args[0].dtype) == ((5, 16), torch.bfloat16)
    assert subject.model.linear.weight.shape == (16, 16)
    text = file("def build(**sizes):\n    return Net(), (torch.ones(sizes['batch_size'], 8),)\n", "takes_anything.py")
    assert from_file(text, PLAIN).build(7, None).args[0].shape == (7, 8)


def test_tensors_of_the_file_and_of_the_factory_mix(file: Any) -> None:
    text = file("INPUT = torch.ones(2, 8)\n\ndef build():\n    return Net(), (INPUT,)\n", "constant.py")
    target = from_file(text, PLAIN)
    for _ in range(2):
        assert explain(target.build(None, None)).fits


def test_a_factory_may_import_its_neighbours(file: Any, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_build.py").write_text("WIDTH = 8\n")
    text = file("from neighbour_of_build import WIDTH\n\ndef build():\n    return Net(WIDTH), torch.ones(2, WIDTH)\n")
    assert from_file(text, PLAIN).build(None, None).args[0].shape == (2, 8)


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("def make():\n    pass\n", r"has no function 'build'; it has make\. It must return"),
        ("build = 3\n", "has no function 'build'; it has none"),
        ("def build(:\n", "train.py raised SyntaxError"),
        ("import no_such_package\n", "train.py raised ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise SystemExit(1)\n", "train.py raised SystemExit: 1"),
        (
            "def build():\n    raise ValueError('first line\\nsecond')\n",
            "build raised ValueError: first line \\(train.py:14\\)$",
        ),
        ("def build():\n    raise KeyError\n", "build raised KeyError \\(train.py:14\\)$"),
        ("def build():\n    exit()\n", "build raised SystemExit"),
        ("def build(size):\n    pass\n", "missing 1 required positional argument: 'size'"),
        ("def build():\n    return Net()\n", r"must return \(model, args\) or .*, not Net$"),
        ("def build():\n    return 1, 2\n", "not a tuple of int, int$"),
        ("def build():\n    return Net(), (), 5\n", "not a tuple of Net, tuple, int$"),
        ("def build():\n    return Net(), (), {}, {}\n", "not a tuple of Net, tuple, dict, dict$"),
    ],
)
def test_files_and_factories_that_fail(file: Any, code: str, match: str) -> None:
    with pytest.raises(OptionsError, match=match) as error:
        from_file(file(code), PLAIN).build(None, None)
    assert "\n" not in str(error.value)


def test_what_a_factory_cannot_be_given(file: Any) -> None:
    text = file("def build():\n    return Net(), torch.ones(2, 8)\n")
    with pytest.raises(OptionsError, match="no parameter 'batch_size'"):
        from_file(text, PLAIN).build(4, None)
    with pytest.raises(OptionsError, match="no parameter 'activation_checkpointing'"):
        from_file(text, ModelOptions(None, True)).build(None, None)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"there is no file /nowhere$"):
        from_file("/nowhere:build", PLAIN)
    with pytest.raises(OptionsError, match=r"there is no file .*none\.py$"):
        from_file(f"{tmp_path}/none.py:build", PLAIN)
    with pytest.raises(OptionsError, match=r"there is no file transformers; .*--module transformers:LlamaForCausalLM"):
        from_file("transformers:LlamaForCausalLM", PLAIN)


# --- classes of transformers ---

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**SMALL, "vocab_size": 100, "max_position_embeddings": 32}
T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**TEXT, "num_key_value_heads": 2},
    "BertForMaskedLM": TEXT,
    "BertForTokenClassification": TEXT,
    "BertForSequenceClassification": TEXT,
    "ViTForImageClassification": {**SMALL, "image_size": 32, "patch_size": 8, "num_labels": 10},
    "GPT2LMHeadModel": {"vocab_size": 100, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 4},
    "T5ForConditionalGeneration": {**T5, "decoder_start_token_id": 0},
}
CHECKPOINTED = tuple(name for name in CONFIGS if not name.startswith("T5"))  # whose checkpointing breaks the graph
OFTEN = ("LlamaForCausalLM", "ViTForImageClassification", "GPT2LMHeadModel")


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(values: object) -> Path:
        path = tmp_path / "config.json"
        path.write_text(values if isinstance(values, str) else json.dumps(values))
        return path

    return write


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, PLAIN) for name in OFTEN),
        *(pytest.param(name, PLAIN, marks=pytest.mark.slow) for name in CONFIGS if name not in OFTEN),
        *(pytest.param(name, ModelOptions(torch.bfloat16, True), marks=pytest.mark.slow) for name in CHECKPOINTED),
    ],
)
def test_transformers(config: Any, name: str, options: ModelOptions) -> None:
    target = from_module(f"transformers:{name}", config(CONFIGS[name]), options)
    assert target.name == name
    subject = target.build(2, None)
    assert all(parameter.is_meta for parameter in subject.model.parameters())
    assert {parameter.dtype for parameter in subject.model.parameters()} == {options.dtype or torch.float32}
    assert subject.model.training
    explanation = explain(subject)
    assert {moment.phase for moment in explanation.moments} == {"forward", "backward"}
    assert explanation.num_parameters == sum(parameter.numel() for parameter in subject.model.parameters())


def test_sizes_of_transformers_inputs(config: Any) -> None:
    path = config(CONFIGS["LlamaForCausalLM"])
    kwargs = from_module("transformers:LlamaForCausalLM", path, PLAIN).build(3, 16).kwargs
    assert {key: kwargs[key].shape for key in ("input_ids", "labels")} == {"input_ids": (3, 16), "labels": (3, 16)}
    default = from_module("transformers:LlamaForCausalLM", path, PLAIN).build(None, None).kwargs
    assert default["input_ids"].shape == (1, 32)


@pytest.mark.parametrize(
    ("text", "values", "match"),
    [
        ("transformers:NoSuchModel", {}, "--module takes a model class of transformers such as"),
        ("torch:Tensor", {}, "for another model write a factory"),
        ("transformers", {}, "--module takes a model class"),
        (":LlamaForCausalLM", {}, "--module :LlamaForCausalLM"),
        ("no_such_package:Model", {}, "No module named 'no_such_package'"),
        ("transformers:LlamaForCausalLM", "{", r"--config .*config\.json"),
        ("transformers:LlamaForCausalLM", "[]", "must hold a JSON object"),
        ("transformers:LlamaForCausalLM", {**TEXT, "hidden_size": "wide"}, "LlamaForCausalLM raised"),
        ("transformers:ResNetForImageClassification", {"depths": 3}, "ResNetForImageClassification raised"),
    ],
)
def test_mistakes_with_transformers(config: Any, text: str, values: object, match: str) -> None:
    with pytest.raises(OptionsError, match=match) as error:
        from_module(text, config(values), PLAIN).build(None, None)
    assert "\n" not in str(error.value)


def test_models_of_other_inputs_and_a_missing_configuration(config: Any) -> None:
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 100, "pad_token_id": 0}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
    path = config({**small, **heads, "decoder_start_token_id": 1})
    with pytest.raises(OptionsError, match="takes neither input_ids nor pixel_values; write a factory"):
        from_module("transformers:WhisperForConditionalGeneration", path, PLAIN).build(None, None)
    with pytest.raises(OptionsError, match=r"--config .*none\.json: .*No such file"):
        from_module("transformers:LlamaForCausalLM", path.with_name("none.json"), PLAIN)
