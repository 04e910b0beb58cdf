"""The optimizer that `explain` and the command are told of: what then trains, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import take_step
from optim_models import BUDGET_NBYTES, MLP, WIDTH, batch, build
from torch import nn

import chunkc
from chunkc.cli.command import main
from chunkc.ir.explanation import Explanation

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

CHOICES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "nothing said": (FP32, {}),
    "bf16 moments": (FP32, {"moments_dtype": BF16}),
    "8-bit moments": (FP32, {"optimizer": "adam", "moments_dtype": "int8"}),
    "split masters": (BF16, {"optimizer": "adamw"}),
    "fp32 masters": (BF16, {"master_weights": "float32"}),
    "bf16 only": (BF16, {"moments_dtype": "bfloat16", "stochastic_rounding": True}),
    "fp16": (FP16, {"optimizer": "adam"}),
    "lamb": (FP32, {"optimizer": "lamb"}),
    "lamb, bf16": (BF16, {"optimizer": "lamb"}),
    "lion, bf16": (BF16, {"optimizer": "lion"}),
    "sgd": (FP32, {"optimizer": "sgd"}),
    "sgd, momentum": (FP32, {"optimizer": "sgd", "momentum": 0.9, "moments_dtype": "int8"}),
    "sgd, bf16 only": (BF16, {"optimizer": "sgd", "stochastic_rounding": True}),
}
CLASSES = {
    "adamw": chunkc.optim.AdamW,
    "adam": chunkc.optim.Adam,
    "lamb": chunkc.optim.LAMB,
    "lion": chunkc.optim.Lion,
    "sgd": chunkc.optim.SGD,
}


def explained(dtype: torch.dtype, **options: Any) -> Explanation:
    options = {"memory_budget": BUDGET_NBYTES, "whole_graph": "never", "activations": "keep", **options}
    return chunkc.explain(MLP().to(dtype), batch(0, dtype), **options)


def made(parameters: Any, chosen: dict[str, Any]) -> torch.optim.Optimizer:
    arguments = dict(chosen)
    return CLASSES[arguments.pop("optimizer", "adamw")](parameters, **arguments)


def assert_as_trained(found: Explanation, model: nn.Module, call: Any, optimizer: Any, dtype: torch.dtype) -> None:
    traffic = []
    for step in range(2):
        take_step(call(batch(step, dtype)), optimizer)
        traffic.append(chunkc.report(model).traffic_nbytes)
    report = chunkc.report(model)
    assert found.predicted_peak_nbytes == report.predicted_peak_nbytes
    assert found.minimum_budget_nbytes == report.minimum_budget_nbytes
    assert found.home_nbytes == report.home_nbytes
    assert found.traffic_nbytes.to_device == traffic[1]["to_device"] - traffic[0]["to_device"]
    assert found.traffic_nbytes.to_home == traffic[1]["to_home"] - traffic[0]["to_home"]


@pytest.mark.quick(3, second=2)
@pytest.mark.parametrize("name", CHOICES)
def test_what_is_told_is_what_trains(name: str) -> None:
    dtype, chosen = CHOICES[name]
    torch._dynamo.reset()
    found = explained(dtype, **chosen)
    model, call = build("adopted", dtype=dtype)
    optimizer = made(model.parameters(), chosen)
    assert explained(dtype).home_nbytes == explained(dtype, optimizer="adamw").home_nbytes
    assert_as_trained(found, model, call, optimizer, dtype)
    # The model's own optimizer counts where nothing is said, and says the same.
    again = chunkc.explain(model, batch(0, dtype))
    assert (again.home_nbytes, again.minimum_budget_nbytes) == (found.home_nbytes, found.minimum_budget_nbytes)
    assert (again.traffic_nbytes, again.step_time_s.optimizer) == (found.traffic_nbytes, found.step_time_s.optimizer)


def test_what_is_told_counts_for_a_model_that_has_an_optimizer() -> None:
    model = MLP()
    optimizer = chunkc.optim.AdamW(model.parameters(), moments_dtype=BF16)
    options = {"memory_budget": BUDGET_NBYTES, "whole_graph": "never", "activations": "keep"}
    own = chunkc.explain(model, batch(0), **options)
    told = chunkc.explain(model, batch(0), moments_dtype=FP32, **options)
    num_elements = told.home_nbytes // 16
    assert (own.home_nbytes, told.home_nbytes) == (12 * num_elements, 16 * num_elements)
    assert chunkc.explain(model, batch(0), **options) == own, "what was told is forgotten"
    assert any(note.startswith("the model's optimizer keeps bfloat16 moments") for note in own.notes)
    assert optimizer.state_dict()["state"] == {}


def test_seconds_of_updates_follow_from_the_bytes_in_the_events() -> None:
    num_elements = sum(parameter.numel() for parameter in MLP().parameters())
    seconds_of_a_byte = set()
    moved = {"nothing said": 28, "bf16 moments": 20, "split masters": 26, "bf16 only": 14, "fp16": 28, "lamb": 40}
    for name, nbytes in moved.items():
        dtype, chosen = CHOICES[name]
        found = explained(dtype, **chosen)
        updates = [event for event in found.events if event.kind == "update"]
        assert sum(event.nbytes for event in updates) == nbytes * num_elements, name
        seconds_of_a_byte.add(found.step_time_s.optimizer / nbytes)
        if name == "lamb":
            assert {event.name[-2:] for event in updates if event.name.startswith("update.")} == {".0", ".1"}
    assert max(seconds_of_a_byte) <= min(seconds_of_a_byte) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("dtype", "chosen", "keeps", "reads", "writes"),
    [
        (FP32, {}, "AdamW keeps float32 moments", 16, 12),
        (BF16, {}, "AdamW keeps float32 moments and the lower 16 bits of masters", 14, 12),
        (FP16, {}, "AdamW keeps float32 moments and float32 masters", 14, 14),
        (FP32, {"optimizer": "sgd"}, "SGD keeps no states", 8, 4),
        (FP32, {"optimizer": "sgd", "momentum": 0.9}, "SGD keeps a float32 momentum buffer", 12, 8),
    ],
)
def test_what_is_assumed_is_said(
    dtype: torch.dtype, chosen: dict[str, Any], keeps: str, reads: int, writes: int
) -> None:
    bytes_of_each = f"an update reads {reads} and writes {writes} bytes of each"
    name = str(dtype).removeprefix("torch.")
    assert f"{keeps} for {name} parameters: {bytes_of_each}" in explained(dtype, **chosen).notes


REFUSED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "moments": (FP32, {"moments_dtype": "float16"}),
    "masters": (FP32, {"master_weights": "half"}),
    "split and stochastic": (BF16, {"master_weights": "split", "stochastic_rounding": True}),
    "split and 8-bit": (BF16, {"master_weights": "split", "moments_dtype": "int8"}),
    "no master": (BF16, {"master_weights": False}),
    "stochastic fp16": (FP16, {"stochastic_rounding": True}),
    "fp64": (torch.float64, {"optimizer": "lamb"}),
    "update_on": (FP32, {"update_on": "gpu"}),
    "overlap": (FP32, {"overlap": "forward"}),
    "no such overlap": (FP32, {"update_on": "cpu", "overlap": "always"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_optimizer_refuses_is_refused_in_its_words(name: str) -> None:
    dtype, chosen = REFUSED[name]
    with pytest.raises(chunkc.ChunkcError) as by_optimizer:
        made(list(MLP().to(dtype).named_parameters()), chosen)
    with pytest.raises(type(by_optimizer.value)) as by_explain:
        explained(dtype, **chosen)
    assert str(by_explain.value) == str(by_optimizer.value)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"optimizer": "muon"}, "optimizer is 'muon'; allowed: adamw, adam, lamb, lion, sgd"),
        ({"momentum": 0.9}, "AdamW has no momentum; SGD has"),
        ({"optimizer": "sgd", "momentum": -0.9}, "momentum must not be negative, got -0.9"),
        ({"optimizer": "lamb", "moments_dtype": "int8"}, "LAMB has no moments_dtype; AdamW, Adam, Lion and SGD have"),
    ],
)
def test_other_refusals(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(chunkc.OptionsError, match=message):
        explained(FP32, **chosen)


def test_without_parameters_to_train() -> None:
    model = MLP().requires_grad_(False)
    found = chunkc.explain(model, batch(0), optimizer="lamb", memory_budget=BUDGET_NBYTES, whole_graph="never")
    assert found.step_time_s.optimizer == 0
    assert not any("LAMB" in note for note in found.notes)


FACTORY = f"""
import torch
from harness import take_step
from optim_models import MLP

def build(batch_size=2, dtype=torch.float32):
    return MLP().to(dtype), (torch.empty(batch_size, {WIDTH}, dtype=dtype),)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `mlp.py`, and no hardware saved by `calibrate`."""
    (tmp_path / "mlp.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


FLAGS = {
    "8-bit moments": ["--optimizer", "adam", "--moments-dtype", "int8"],
    "fp32 masters": ["--dtype", "bfloat16", "--master-weights", "float32"],
    "bf16 only": ["--dtype", "bfloat16", "--moments-dtype", "bfloat16", "--stochastic-rounding"],
    "lamb": ["--optimizer", "lamb"],
}


@pytest.mark.parametrize("name", FLAGS)
def test_the_command_says_the_same(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "mlp.py:build", "--memory-budget", str(BUDGET_NBYTES), "--format", "json"]
    assert main([*arguments, *FLAGS[name]]) == 0
    found = json.loads(capsys.readouterr().out)
    dtype, chosen = CHOICES[name]
    expected = explained(dtype, whole_graph="auto", hardware="cpu", **chosen)
    assert found["home_nbytes"] == expected.home_nbytes
    assert found["minimum_budget_nbytes"] == expected.minimum_budget_nbytes
    assert found["step_time_s"]["optimizer"] == expected.step_time_s.optimizer


def test_the_largest_batch_depends_on_the_optimizer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "mlp.py:build", "--memory-budget", "900KiB", "--largest", "batch_size", "--format", "json"]
    sizes = []
    for flags in ([], ["--moments-dtype", "bfloat16"]):
        assert main([*arguments, *flags]) == 0
        found = json.loads(capsys.readouterr().out)
        sizes.append(int(found["model"].rpartition(" ")[2]))
        assert found["fits"]
    assert sizes[0] < sizes[1]
