"""`chunkc.report`: its fields agree with each other, with the plan and with what ran."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from harness import segmented, take_step
from plain_modules import Stack
from torch import Tensor, nn

import chunkc
from chunkc.ir.layout import Chunk
from chunkc.runtime.device import cpu_allocator
from chunkc.runtime.execution.run import Measurement
from chunkc.runtime.store.slots import ChunkSlots
from chunkc.runtime.store.store import ChunkStore

WIDTH, LAYERS = 128, 4
BUDGET_NBYTES = 400 * 1024
WEIGHT_NBYTES = 4 * WIDTH * WIDTH


def mlp() -> nn.Module:
    """Weights that live in chunks of their own, without biases."""
    return Stack(LAYERS, width=WIDTH, bias=False)


def compiled(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return segmented(model, **{"memory_budget": BUDGET_NBYTES, **options})


def trained(num_steps: int = 2, **options: Any) -> tuple[nn.Module, Callable[..., Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp()
    call, optimizer = compiled(model, **options), chunkc.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        step(call, optimizer)
    return model, call, optimizer


@functools.cache
def trained_once() -> tuple[nn.Module, Callable[..., Tensor]]:
    """For tests that read its report, and no more."""
    return trained()[:2]


def step(call: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> None:
    take_step(call(torch.ones(2, WIDTH)), optimizer)


def test_fields_under_a_small_budget() -> None:
    model, call = trained_once()
    report = chunkc.report(model)
    assert dataclasses.replace(chunkc.report(call), time_s=report.time_s) == report
    assert report.memory_budget_nbytes == BUDGET_NBYTES
    assert 0 < report.minimum_budget_nbytes <= report.predicted_peak_nbytes <= BUDGET_NBYTES
    assert report.chunk_size_nbytes == WEIGHT_NBYTES
    assert (report.num_chunks, report.num_resident_chunks) == (LAYERS, 0)
    assert report.home_nbytes == 4 * LAYERS * WEIGHT_NBYTES  # parameter, gradient, two moments
    assert set(report.traffic_nbytes) == {"to_device", "to_home"}
    assert set(report.time_s) == {"compute", "host", "wait", "to_device", "to_home"}
    assert report.num_instructions > 0
    assert report.time_s["compute"] > 0
    assert all(seconds >= 0 for seconds in report.time_s.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.num_chunks = 3  # type: ignore[misc]


def test_where_all_fits_nothing_moves() -> None:
    model, _, _ = trained(memory_budget="64MiB")
    report = chunkc.report(model)
    assert (report.num_chunks, report.num_resident_chunks) == (LAYERS, LAYERS)
    assert (dict(report.traffic_nbytes), report.home_nbytes) == ({"to_device": 0, "to_home": 0}, 0)


def test_moments_are_those_of_the_latest_step() -> None:
    report = chunkc.report(trained_once()[0])
    labels = [label for label, _, _ in report.moments]
    assert len(set(labels)) == len(labels)
    phases = [label.partition(".")[0] for label in labels]
    assert list(dict.fromkeys(phases)) == ["forward", "backward", "update"]
    assert phases.count("update") == LAYERS
    assert max(nbytes for _, nbytes, _ in report.moments) == report.predicted_peak_nbytes


def test_moments_are_sums_of_what_the_plan_says() -> None:
    report = chunkc.report(trained_once()[0])
    lines = {line.split()[0]: line for line in report.plan_text.splitlines() if " = " in line}
    for label, nbytes, _ in report.moments:
        total, _, parts = lines[label].split(maxsplit=1)[1].partition(" = ")
        numbers = [int(word.replace(",", "")) for word in parts.split()[:8] if word.replace(",", "").isdigit()]
        assert int(total.replace(",", "")) == nbytes == sum(numbers[:3]), lines[label]


def test_what_no_plan_knows_is_told_apart() -> None:
    """A copy of the model that the program keeps: the plan's part of what was measured stays the same, to the byte."""
    cpu_allocator.install()
    gc.collect()
    for copies in (0, 3):
        torch.manual_seed(0)
        foreign_nbytes = cpu_allocator.current_nbytes()
        model = mlp()
        call, optimizer = compiled(model), chunkc.optim.AdamW(model.parameters())
        beside = [copy.deepcopy(model) for _ in range(copies)]
        for _ in range(2):
            step(call, optimizer)
        report = chunkc.report(model)
        assert report.measured_planned_nbytes is not None
        assert 0.99 * report.predicted_peak_nbytes < report.measured_planned_nbytes <= report.predicted_peak_nbytes
        known_nbytes = foreign_nbytes + sum(p.nbytes for other in beside for p in other.parameters())
        assert 0 <= report.unplanned_nbytes - known_nbytes <= 4 * 2 * WIDTH  # an input, a loss and its gradient
        assert report.measured_peak_nbytes == report.measured_planned_nbytes + report.unplanned_nbytes
        assert ("in no plan" in str(report)) == (report.unplanned_nbytes > 0)
        del call, optimizer, model
        gc.collect()


class _Transposed(nn.Module):
    """Its gradient is the transposed gradient of its output: a backward's first moment copies it, in blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(100, 200))

    def forward(self) -> torch.Tensor:
        return self.weight.t().contiguous()


@pytest.mark.parametrize("other_nbytes", [0, 1000, 160_000])
@pytest.mark.parametrize("is_ample", [False, True])
def test_the_first_moment_s_copies_of_gradients_hide_no_other_tensors(other_nbytes: int, is_ample: bool) -> None:
    cpu_allocator.install()
    gc.collect()
    foreign_nbytes = cpu_allocator.current_nbytes()
    other = torch.empty(other_nbytes, dtype=torch.uint8)
    budget_nbytes, report = 1 << 30 if is_ample else 1, None
    while report is None:
        model = _Transposed()
        call, optimizer = compiled(model, memory_budget=budget_nbytes), chunkc.optim.SGD(model.parameters(), lr=0.1)
        try:
            for _ in range(2):
                optimizer.zero_grad()
                out = call()
                out.backward(torch.ones_like(out))
                del out
                optimizer.step()
            report = chunkc.report(model)
        except chunkc.BudgetError as error:
            budget_nbytes = error.minimum_nbytes
        torch._dynamo.reset()
        del model, call, optimizer
        gc.collect()
    assert report.measured_planned_nbytes == report.predicted_peak_nbytes
    assert report.unplanned_nbytes == foreign_nbytes + other.nbytes


def test_what_a_run_itself_takes_too_much_is_no_other_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is there before a run counts as the program's."""
    cpu_allocator.install()
    model, call, optimizer = trained()
    before = chunkc.report(model)
    begin = Measurement.begin
    leaked: list[Tensor] = []

    def leaking(measurement: Measurement, store: ChunkStore) -> None:
        leaked[:] = [torch.zeros(1 << 20)]
        begin(measurement, store)

    monkeypatch.setattr(Measurement, "begin", leaking)
    step(call, optimizer)
    assert before.measured_planned_nbytes is not None
    assert before.measured_planned_nbytes <= before.predicted_peak_nbytes
    found = chunkc.report(model).measured_planned_nbytes
    assert found is not None
    assert found >= before.measured_planned_nbytes + (3 << 20)
    leaked.clear()


def test_traffic_grows_by_the_same_bytes_every_step() -> None:
    model, call, optimizer = trained()
    seen = [chunkc.report(model).traffic_nbytes]
    for _ in range(3):
        step(call, optimizer)
        seen.append(chunkc.report(model).traffic_nbytes)
    for way in ("to_device", "to_home"):
        grown = [after[way] - before[way] for before, after in pairwise(seen)]
        assert len(set(grown)) == 1
        assert grown[0] >= 3 * LAYERS * WEIGHT_NBYTES, way  # at least the update's


def test_a_report_is_a_snapshot() -> None:
    model, call, optimizer = trained(1)
    report = chunkc.report(model)
    before = dataclasses.replace(report, traffic_nbytes=dict(report.traffic_nbytes), time_s=dict(report.time_s))
    step(call, optimizer)
    assert report == before
    assert chunkc.report(model).traffic_nbytes["to_device"] > report.traffic_nbytes["to_device"]


def test_after_the_first_forward_only() -> None:
    model, call, _ = trained(0)
    loss = call(torch.ones(2, WIDTH))
    assert {label.partition(".")[0] for label, _, _ in chunkc.report(model).moments} == {"forward"}
    loss.backward()


def test_the_host_s_time_is_that_of_the_latest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the first one, which compiled; of all its forwards and backwards; without waiting for copies."""
    model, call, optimizer = trained(num_steps=1)
    first = chunkc.report(model).host_step_s
    assert list(first) == ["forward", "backward", "update"]
    began_s = time.perf_counter()
    step(call, optimizer)
    took_s = time.perf_counter() - began_s
    latest = chunkc.report(model).host_step_s
    assert set(latest) == set(first)
    assert all(seconds > 0 for seconds in latest.values())
    assert sum(latest.values()) < took_s
    wait = ChunkSlots.wait

    def slow(slots: ChunkSlots, chunk: Chunk) -> None:
        time.sleep(0.01)
        slots.traffic.wait_s += 0.01
        wait(slots, chunk)

    monkeypatch.setattr(ChunkSlots, "wait", slow)
    began_s, waited_s = time.perf_counter(), chunkc.report(model).time_s["wait"]
    step(call, optimizer)
    took_s, found = time.perf_counter() - began_s, chunkc.report(model)
    waited_s = found.time_s["wait"] - waited_s
    assert waited_s >= 0.02
    assert sum(found.host_step_s.values()) <= took_s - waited_s
    monkeypatch.undo()
    two = [call(torch.ones(2, WIDTH)) for _ in range(2)]
    one_s = chunkc.report(model).host_step_s["forward"]
    call(torch.ones(2, WIDTH))
    assert "backward" not in chunkc.report(model).host_step_s
    assert chunkc.report(model).host_step_s["forward"] > one_s
    sum(two).backward()  # type: ignore[union-attr]


def test_printed() -> None:
    report = chunkc.Report(
        memory_budget_nbytes=3 * 2**20, predicted_peak_nbytes=2**20, measured_peak_nbytes=None,
        minimum_budget_nbytes=512, home_nbytes=1536, chunk_size_nbytes=4096, num_chunks=7, num_resident_chunks=2,
        traffic_nbytes={"to_device": 2048, "to_home": 0}, time_s={"compute": 1.25, "to_home": 0.0}, moments=(),
        plan_text="", host_step_s={"forward": 0.0625},
    )  # fmt: skip
    assert str(report).splitlines() == [
        "budget             3.00 MiB (3,145,728 bytes)",
        "smallest budget    512 bytes",
        "predicted peak     1.00 MiB (1,048,576 bytes)",
        "measured peak      not metered",
        "at home            1.50 KiB (1,536 bytes)",
        "chunks             7 of 4.00 KiB (4,096 bytes), 2 resident",
        "moved to device    2.00 KiB (2,048 bytes)",
        "moved to home      0 bytes",
        "time, compute      1.250 s",
        "time, to home      0.000 s",
        "latest forward     0.062 s of the host",
    ]
    metered = str(dataclasses.replace(report, measured_peak_nbytes=1024))
    assert "measured peak      1.00 KiB (1,024 bytes)" in metered


def test_nothing_is_known_of_other_models() -> None:
    for model in (mlp(), nn.ReLU()):
        with pytest.raises(chunkc.ChunkcError, match="placed or compiled"):
            chunkc.report(model)
    model = mlp()
    compiled(model)  # not called yet
    with pytest.raises(chunkc.ChunkcError, match="first call"):
        chunkc.report(model)


def test_a_function_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"the model that is trained, a torch\.nn\.Module, not function"):
        chunkc.report(torch.compile(torch.sin, backend="chunkc"))


def test_models_compiled_apart_have_reports_of_their_own() -> None:
    both = nn.ModuleList([trained_once()[0], trained(memory_budget="64MiB")[0]])
    with pytest.raises(chunkc.ChunkcError, match="several"):
        chunkc.report(both)
    assert [chunkc.report(model).memory_budget_nbytes for model in both] == [BUDGET_NBYTES, 64 * 2**20]
