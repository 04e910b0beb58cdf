"""What is explained is what training does: peaks, minimum, chunks and traffic against `chunkc.report` of a real run."""

from __future__ import annotations

import dataclasses
import json
import pickle
import typing
from typing import Any

import pytest
import torch
from doc_pages import ROOT, named, rows
from harness import HUGE, adamw, compile_case, take_step
from torch import fx
from zoo import CASES

import chunkc
from chunkc.explaining.cuda_offline import overhead_on
from chunkc.explaining.formats import parse_json, render_json, render_text
from chunkc.ir.errors import OptionsError
from chunkc.ir.explanation import COMPUTE, KINDS, Explanation
from chunkc.ir.hardware import GIB, Hardware
from chunkc.ir.links import TO_DEVICE, TO_DISK, TO_HOME, host_links
from chunkc.machines.presets import load_hardware

NAMES = ("frozen_mlp", *(pytest.param(name, marks=pytest.mark.second_tier) for name in ("convnet", "big_embedding")))
"""Of all models of the ladder training is planned from what explanations are: `tests/end_to_end/test_one_policy.py`."""

MLP_NBYTES = 1_500_000
"""A budget in which `frozen_mlp` trains, and has to move what it trains."""


def explain(case: str, **options: Any) -> Explanation:
    """The step that keeps all saved values, as `compile_case` does."""
    return chunkc.explain(CASES[case].build(), **CASES[case].batch(0), **{"activations": "keep"} | options)


@pytest.fixture(scope="module")
def moving() -> Explanation:
    return explain("frozen_mlp", memory_budget=MLP_NBYTES)


def trained(name: str, **options: Any) -> tuple[chunkc.Report, dict[str, int]]:
    """The report after two steps, and the traffic of the second."""
    case = CASES[name]
    model, compiled = compile_case(case, place=False, **options)
    optimizer = adamw(model.parameters())
    traffic = [{"to_device": 0, "to_home": 0}]
    for step in range(2):
        batch = case.batch(step)
        loss = case.loss(compiled(**batch))
        take_step(loss, optimizer)
        del batch, loss
        traffic.append(dict(chunkc.report(model).traffic_nbytes))
    return chunkc.report(model), {way: traffic[2][way] - traffic[1][way] for way in traffic[0]}


def assert_as_trained(explanation: Explanation, name: str, **options: Any) -> None:
    check_itself(explanation)
    report, traffic = trained(name, memory_budget=explanation.memory_budget_nbytes, **options)
    assert explanation.fits
    assert explanation.predicted_peak_nbytes == report.predicted_peak_nbytes
    assert explanation.minimum_budget_nbytes == report.minimum_budget_nbytes
    chunks = explanation.chunks
    assert (chunks.size_nbytes, chunks.count) == (report.chunk_size_nbytes, report.num_chunks)
    assert chunks.resident == report.num_resident_chunks
    assert explanation.home_nbytes == report.home_nbytes
    assert dataclasses.asdict(explanation.traffic_nbytes) == traffic
    latest = {label: nbytes for label, nbytes, _ in report.moments}
    predicted: dict[str, int] = {}
    for moment in explanation.moments:
        predicted[moment.call] = max(predicted.get(moment.call, 0), moment.nbytes)
    assert {call: predicted[call] for call in latest} == latest


def check_itself(explanation: Explanation) -> None:
    """What one explanation says in several places is the same."""
    peak = explanation.predicted_peak_nbytes
    assert max(moment.nbytes for moment in explanation.moments) == peak
    assert sum(explanation.peak.contents.values()) == peak
    assert explanation.peak.moment in {moment.call for moment in explanation.moments}
    time = explanation.step_time_s
    assert time.total == pytest.approx(time.compute + time.optimizer + time.stall)
    assert time.optimizer > 0
    moved = {way: sum(e.nbytes for e in explanation.events if e.stream == way) for way in (TO_DEVICE, TO_HOME)}
    assert moved == dataclasses.asdict(explanation.traffic_nbytes)
    assert all(set(moment.contents) <= set(KINDS) for moment in explanation.moments)
    assert all(nbytes >= 0 for moment in explanation.moments for nbytes in moment.contents.values())
    assert all(nbytes > 0 for nbytes in explanation.peak.contents.values())


@pytest.mark.parametrize("name", NAMES)
def test_as_trained_in_the_minimum_and_in_half(name: str) -> None:
    not_fitting = explain(name, memory_budget=1, whole_graph="never")
    minimum, everything = not_fitting.minimum_budget_nbytes, explain(name, memory_budget=HUGE, whole_graph="never")
    assert not not_fitting.fits
    assert not_fitting.memory_budget_nbytes == 1
    assert not_fitting.predicted_peak_nbytes <= minimum
    check_itself(not_fitting)
    for budget in {minimum, max(minimum, everything.predicted_peak_nbytes // 2)}:
        explanation = explain(name, memory_budget=budget, whole_graph="never")
        assert explanation.minimum_budget_nbytes == minimum
        assert_as_trained(explanation, name, whole_graph="never")


@pytest.mark.parametrize("name", ["convnet", pytest.param("called_twice", marks=pytest.mark.second_tier)])
def test_as_trained_where_all_fits(name: str) -> None:
    explanation = explain(name, memory_budget=HUGE)
    assert set(dataclasses.asdict(explanation.traffic_nbytes).values()) == {0}
    assert (explanation.home_nbytes, explanation.step_time_s.stall) == (0, 0)
    assert explanation.chunks.resident == explanation.chunks.count
    assert any("compiled whole" in note for note in explanation.notes)
    assert_as_trained(explanation, name)


@pytest.mark.second_tier
def test_as_trained_with_a_chunk_size(moving: Explanation) -> None:
    explanation = explain("frozen_mlp", memory_budget=MLP_NBYTES, chunk_size="128KiB")
    assert explanation.chunks.size_nbytes < moving.chunks.size_nbytes
    assert_as_trained(explanation, "frozen_mlp", chunk_size="128KiB")


def test_what_fits_whole_trains_in_segments_in_less() -> None:
    """The smallest budget is that of the segments, whichever form a budget asks for."""
    minimum = explain("frozen_mlp", memory_budget=1).minimum_budget_nbytes
    whole = explain("frozen_mlp", memory_budget=HUGE)
    assert (whole.minimum_budget_nbytes, whole.chunks.resident) == (minimum, whole.chunks.count)
    assert minimum < whole.predicted_peak_nbytes
    assert trained("frozen_mlp", memory_budget=HUGE)[0].minimum_budget_nbytes == minimum
    assert trained("frozen_mlp", memory_budget=minimum)[0].predicted_peak_nbytes <= minimum


def test_explained_inside_no_grad() -> None:
    """No backward and no update: an inference call."""
    with torch.no_grad():
        explanation = explain("frozen_mlp", memory_budget=MLP_NBYTES)
    assert {moment.phase for moment in explanation.moments} == {"forward"}
    assert explanation.step_time_s.optimizer == 0


# --- budgets and hardware ---


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        ("6GB", 6 * 10**9),
        ("6 GiB", 6 * GIB),
        ("6GiB", 6 * GIB),
        (12345678, 12345678),
        ("50%", int(23.5 * GIB) // 2),
        ("auto", int(0.9 * (int(23.5 * GIB) - 400 * 2**20 - 64 * 2**21))),  # page tables of 64 GiB of RAM
    ],
)
def test_budgets_on_a_preset(budget: int | str, nbytes: int) -> None:
    explanation = explain("frozen_mlp", memory_budget=budget, hardware="rtx3090")
    assert explanation.memory_budget_nbytes == nbytes
    assert (explanation.hardware, explanation.device_memory_nbytes) == ("rtx3090", int(23.5 * GIB))
    page_table_nbytes = -(-8 * explanation.home_nbytes // 4096)
    assert explanation.overhead_nbytes == 400 * 2**20 + page_table_nbytes


@pytest.mark.parametrize(
    ("budget", "match"),
    [
        *((budget, "memory_budget") for budget in ("lots", "6 Gigabytes", -1, 0, "120%", True)),
        *((budget, r"a device of rtx3090 has 23\.11 GiB") for budget in ("24GiB", "100%")),
    ],
)
def test_budgets_without_sense(budget: Any, match: str) -> None:
    with pytest.raises(OptionsError, match=match):
        explain("frozen_mlp", memory_budget=budget, hardware="rtx3090")


def test_hardware_of_unknown_size() -> None:
    machine = Hardware(1e12, 1e11, host_links(1e10, 1e10), name="mine")
    with pytest.raises(OptionsError, match="'mine' does not say how much memory"):
        explain("frozen_mlp", hardware=machine)
    explanation = explain("frozen_mlp", hardware=machine, memory_budget="64MiB")
    assert (explanation.fits, explanation.host_fits, explanation.device_memory_nbytes) == (True, True, None)


def test_a_machine_with_one_memory_says_that_a_home_in_ram_adds_none() -> None:
    explanation = explain("frozen_mlp", hardware="dgx-spark")
    assert explanation.host_memory_nbytes == 16 * GIB
    assert "as the host's: a home in RAM adds no memory, only a home on disk does" in " ".join(explanation.notes)


def test_a_faster_machine_is_faster_and_needs_no_more() -> None:
    names = ("rtx2060-6g", "a100-80g", "h100")
    slow, fast, hopper = (explain("frozen_mlp", hardware=name, memory_budget=MLP_NBYTES) for name in names)
    assert hopper.step_time_s.total < fast.step_time_s.total < slow.step_time_s.total
    assert fast.minimum_budget_nbytes == slow.minimum_budget_nbytes
    # cuBLAS's workspaces, of two threads: 32 MiB each from Hopper on, 8,320 KiB before.
    assert hopper.minimum_budget_nbytes - fast.minimum_budget_nbytes == 2 * (32 * 2**20 - 8320 * 2**10)


def with_slow_disk(hardware: Hardware) -> Hardware:
    to_device, to_home = (link.bytes_per_s for link in hardware.links[:2])
    return dataclasses.replace(hardware, links=host_links(to_device, to_home, from_disk=1e6, to_disk=1e6))


def test_a_home_on_disk_is_as_slow_as_the_disk() -> None:
    machine = with_slow_disk(load_hardware("cpu"))
    budget = {"memory_budget": MLP_NBYTES, "hardware": machine}
    ram, disk = explain("frozen_mlp", **budget), explain("frozen_mlp", home="disk", **budget)
    assert (ram.disk_nbytes, disk.disk_nbytes) == (0, disk.home_nbytes)
    assert disk.step_time_s.to_home == pytest.approx(disk.traffic_nbytes.to_home / 1e6)
    assert ram.step_time_s.to_home < disk.step_time_s.to_home / 100


def test_behind_a_gpu_only_states_are_on_disk() -> None:
    """As `runtime.staging` has it: parameters and gradients stay in pinned memory, and cross the link at its rate."""
    machine = with_slow_disk(load_hardware("rtx3090"))
    budget = {"memory_budget": MLP_NBYTES + overhead_on(machine), "hardware": machine, "overlap": "none"}
    ram, disk = explain("frozen_mlp", **budget), explain("frozen_mlp", home="disk", **budget)
    assert disk.home_nbytes == ram.home_nbytes
    assert 0 < disk.disk_nbytes < disk.home_nbytes
    last_of_kind = {copy.name.partition(":")[0]: copy for copy in disk.events if copy.kind == "write_back"}
    assert last_of_kind.keys() == {"param", "grad", "exp_avg", "exp_avg_sq"}
    for kind, copy in last_of_kind.items():
        assert copy.stream == (TO_DISK if kind.startswith("exp") else TO_HOME)
        rate = machine.link(copy.stream).bytes_per_s
        assert copy.end_s - copy.start_s == pytest.approx(copy.nbytes / rate), kind
    in_ram = dataclasses.replace(machine, host_memory_nbytes=disk.home_nbytes - disk.disk_nbytes)
    assert explain("frozen_mlp", **budget | {"hardware": in_ram}, home="disk").host_fits
    less = dataclasses.replace(machine, host_memory_nbytes=disk.home_nbytes - disk.disk_nbytes - 1)
    assert not explain("frozen_mlp", **budget | {"hardware": less}, home="disk").host_fits
    everything = explain("frozen_mlp", **budget | {"hardware": less}, home="disk", disk_holds="everything")
    assert everything.host_fits
    assert everything.disk_nbytes == everything.home_nbytes
    assert everything.step_time_s.to_device > disk.step_time_s.to_device
    as_on_a_gpu = budget | {"hardware": load_hardware("cpu"), "memory_budget": MLP_NBYTES}
    on_cpu = explain("frozen_mlp", **as_on_a_gpu, home="disk", disk_holds="states")
    assert on_cpu.disk_nbytes == disk.disk_nbytes


# --- what is handed out ---


def test_the_json_has_the_documented_keys(moving: Explanation) -> None:
    values = json.loads(render_json(moving))
    page = (ROOT / "docs" / "explain.md").read_text()
    assert set(values) == {key for row in rows(page, "key") for key in named(row[0])}
    wanted = {
        "peak": {"moment", "op", "module", "contents", "source"},
        "chunks": {"size_nbytes", "count", "resident"},
        "traffic_nbytes": {"to_device", "to_home"},
        "step_time_s": {"total", "compute", "to_device", "to_home", "optimizer", "stall"},
    }
    assert {key: set(values[key]) for key in wanted} == wanted
    assert parse_json(json.dumps(values)) == moving


def test_it_is_frozen_named_and_told_of_and_shows_graphs_and_plan(moving: Explanation) -> None:
    told: list[str] = []
    assert explain("frozen_mlp", memory_budget=MLP_NBYTES, name="mine", show=told.append).model == "mine"
    assert told == ["tracing the model", "planning"]
    assert (moving.model, moving.codegen) == ("FrozenMLP", "eager")
    with pytest.raises(dataclasses.FrozenInstanceError):
        moving.fits = False  # type: ignore[misc]
    assert typing.get_type_hints(chunkc.explain)["return"] is Explanation
    assert set(moving.graphs) == {"forward", "backward"}
    assert "prefetch" in moving.graphs["forward"]
    assert "resident groups" in moving.plan_text
    assert {event.stream for event in moving.events if event.kind == "stall"} <= {COMPUTE}
    assert moving.step_time_s.stall > 0


def test_graphs_are_written_as_code_only_where_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[fx.Graph] = []

    def code_of(graph: fx.Graph) -> str:
        written.append(graph)
        return f"graph {len(written)}"

    monkeypatch.setattr("chunkc.explaining.explain.code_of", code_of)
    explanation = explain("frozen_mlp", memory_budget=MLP_NBYTES)
    assert render_text(explanation)
    assert (list(explanation.graphs), len(explanation.graphs)) == (["forward", "backward"], 2)
    assert not written
    assert [explanation.graphs["backward"] for _ in range(2)] == ["graph 1"] * 2
    assert pickle.loads(pickle.dumps(explanation)) == explanation
    assert explanation.to_dict()["graphs"] == {"forward": "graph 2", "backward": "graph 1"}
    assert len(written) == 2
