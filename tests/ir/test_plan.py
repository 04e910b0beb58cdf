"""A plan is data: it adds up, and prints the same text for the same program.

To accept a changed print, delete `tests/golden/plan.txt` and run this file twice.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import Chunk, ParamSpec
from chunkc.ir.links import host_links
from chunkc.ir.plan import Moment, PhasePlan, Plan, Position
from chunkc.passes.planning.layout import lay_out
from chunkc.passes.planning.room import Room
from chunkc.passes.planning.timeline import plan_phases

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "plan.txt"


def tiny_plan() -> Plan:
    """Three layers of one chunk each, forward and backward, under the smallest budget and one chunk more."""
    layout = lay_out([ParamSpec(f"h.{i}.w", (1024,), (1,), torch.float32, True) for i in range(3)], 4096)

    def call(phase: str, number: int, layer: int, nbytes: int, writes: frozenset[str] = frozenset()) -> Position:
        reads = frozenset({Chunk("param", layer)})
        return Position(f"{phase}.{number}", phase, nbytes, "aten.mm", f"h.{layer}", reads, writes, 1.0)

    forward = [call("forward", i, i, 1000 + 100 * i) for i in range(3)]
    backward = [call("backward", 2 - i, i, 1200, frozenset({Chunk("grad", i)})) for i in reversed(range(3))]
    budget = Room.of(layout, 1 << 30).check_minimum((*forward, *backward)) + 4096
    return plan_phases(
        [("forward", forward), ("backward", backward)],
        Room.of(layout, budget),
        hardware=Hardware(1.0, 1.0, host_links(4096.0, 4096.0)),
        boundary_nbytes=500,
    )


def test_a_plan_prints_as_it_did() -> None:
    text = str(tiny_plan())
    if not GOLDEN.exists():
        GOLDEN.write_text(text)
        pytest.fail(f"{GOLDEN.name} was missing and is written anew: read it, and run again")
    assert text == GOLDEN.read_text()


def test_a_backward_begins_cold_unless_it_finds_what_its_forward_left() -> None:
    plan = tiny_plan()
    assert plan.kept
    assert not plan.begins_cold(plan.kept)
    assert plan.begins_cold(frozenset())
    assert plan.begins_cold(plan.kept | {Chunk("param", 0)})
    alone = replace(plan, phases=plan.phases[1:], kept=frozenset())
    assert alone.begins_cold(frozenset()), "a plan of the backward alone is one that begins cold"


def moment(name: str, parameters: int, non_model: int, slots: int) -> Moment:
    return Moment(name, "forward", "aten.mm", "h.0", parameters, 0, 0, 0, non_model, slots)


def test_the_peak_is_the_fullest_moment_of_all_phases() -> None:
    phases = (
        PhasePlan("forward", ((), ()), (moment("a", 1, 2, 3),)),
        PhasePlan("backward", ((), (), ()), (moment("b", 1, 2, 4), moment("c", 0, 0, 0))),
    )
    plan = Plan(100, 7, frozenset(), phases, frozenset())
    assert [m.name for m in plan.moments] == ["a", "b", "c"]
    assert plan.peak.name == "b"
    assert plan.predicted_peak_nbytes == 7
    assert Plan(100, 0, frozenset(), (), frozenset()).predicted_peak_nbytes == 0


def test_a_position_needs_what_it_reads_and_writes() -> None:
    found = Position("a", "forward", 0, "op", "", frozenset({"x", "y"}), frozenset({"y", "z"}), 0.0)
    assert found.items == {"x", "y", "z"}
