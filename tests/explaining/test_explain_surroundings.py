"""What is around a model: the host's memory, the caller's default device, checkpointing, and what is not exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import chunkc
from chunkc.cli import command as cli
from chunkc.explaining.formats import render_text
from chunkc.explaining.formats.advice import advice
from chunkc.explaining.offline import capture_offline
from chunkc.ir.explanation import Explanation
from chunkc.ir.hardware import CPU
from chunkc.machines.presets import load_hardware
from chunkc.passes.memory.scratch.operators import EXCEPTIONS

BUDGET_NBYTES = 2 * 2**20


class Net(nn.Module):
    """Makes a tensor of its own, on the default device."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.arange(256)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else torch.tanh(layer(x))
        return x.square().mean()


def explain(rows: int = 8, *, checkpointed: bool = False, **options: object) -> Explanation:
    with torch.device("meta"):
        model, x = Net(checkpointed=checkpointed), torch.ones(rows, 256)
    return chunkc.explain(model, x, **{"memory_budget": BUDGET_NBYTES, **options})  # type: ignore[arg-type]


# --- one memory for both tiers ---


def on_cpu_with(host_nbytes: int, **options: object) -> Explanation:
    return explain(hardware=dataclasses.replace(CPU, host_memory_nbytes=host_nbytes), **options)


def test_on_a_cpu_home_and_peak_must_fit_together() -> None:
    found = explain()
    together = found.home_nbytes + found.predicted_peak_nbytes
    assert found.device_is_host
    assert found.host_needs_nbytes == together
    assert on_cpu_with(together).host_fits
    assert not on_cpu_with(together - 1).host_fits
    peak = found.predicted_peak_nbytes
    assert on_cpu_with(peak, home="disk").host_fits
    assert not on_cpu_with(peak - 1, home="disk").host_fits


def test_an_assumed_host_is_named() -> None:
    def said(found: Explanation) -> bool:
        return "a host with 64.00 GiB of RAM is assumed, as usual for rtx3090" in " ".join(found.notes)

    assert said(explain(hardware="rtx3090"))
    assert not said(explain(hardware=dataclasses.replace(load_hardware("rtx3090"), host_memory_nbytes=2**37)))


def test_what_the_backward_updates_has_room_on_the_host() -> None:
    """By default on a GPU: shadow copies take half of what homes leave, and all others are updated by `step()`."""
    budget_nbytes = 49 * 2**19
    at_once, in_step = (
        explain(hardware="rtx3090", overlap=overlap, memory_budget=budget_nbytes) for overlap in ("auto", "none")
    )
    shadow_nbytes = at_once.home_nbytes - in_step.home_nbytes
    machine = dataclasses.replace(
        load_hardware("rtx3090"), host_memory_nbytes=in_step.home_nbytes + shadow_nbytes + shadow_nbytes // 2
    )
    some = explain(hardware=machine, memory_budget=budget_nbytes)
    assert in_step.home_nbytes < some.home_nbytes <= machine.host_memory_nbytes - shadow_nbytes // 2
    assert at_once.traffic_nbytes.to_device < some.traffic_nbytes.to_device < in_step.traffic_nbytes.to_device
    assert any("of 3 of 4 chunks twice" in note for note in some.notes)


def test_the_text_adds_both_up() -> None:
    assert "with the predicted peak, in the same" in render_text(on_cpu_with(2**20))
    assert "with the predicted peak" not in render_text(explain(hardware="rtx3090"))


# --- the default device ---


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_inside_torch_device() -> None:
    wanted = explain()
    with torch.device("meta"):
        assert explain() == wanted


def test_under_a_default_device(meta_by_default: None) -> None:
    (graph,) = capture_offline(Net(), (torch.ones(8, 256),), {}, codegen="eager").graphs
    devices = {node.meta["val"].device.type for node in graph.capture.forward.graph.nodes if "val" in node.meta}
    assert devices == {"cpu"}


# --- advice ---


@pytest.mark.parametrize("checkpointed", [False, True])
def test_checkpointing_is_not_advised_where_it_is_on(checkpointed: bool) -> None:
    found = explain(4096, checkpointed=checkpointed, memory_budget=1)
    assert found.activation_checkpointing == checkpointed
    words = " ".join(
        advice(dataclasses.replace(found, peak=dataclasses.replace(found.peak, contents={"activations": 1})))
    )
    assert "a smaller batch" in words
    assert ("activation checkpointing" in words) == (not checkpointed)


# --- exceptions ---


def test_the_command_prints_what_is_not_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--exceptions"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("| what | when | why | predicted instead |\n")
    assert all(name.removeprefix("aten::") in out for name in EXCEPTIONS)
