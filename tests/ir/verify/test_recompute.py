"""The verifier on storages that are dropped and made again: plans are accepted, each sabotage is reported."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import fx
from verify_cases import HARDWARE, HUGE, LAYOUT, MEMORIES, backward_program, forward_program

from chunkc.ir import chunk_ops
from chunkc.ir.items import SavedStorage
from chunkc.ir.program import PhaseProgram
from chunkc.ir.verify.recompute import RecomputeSpec, verify_recompute
from chunkc.ir.verify.verifier import verify_phase
from chunkc.passes.memory.profile import positions
from chunkc.passes.planning.offload import SMALL_NBYTES, candidates, with_offloaded
from chunkc.passes.planning.recompute import Recomputable, with_recompute
from chunkc.passes.planning.room import Room
from chunkc.passes.planning.timeline import plan_phases
from chunkc.passes.rewrite.insert import insert_events

aten = torch.ops.aten
GONE = ("forward.0:0", "forward.1:0", "forward.2:0")


def layer(*operators: Any) -> fx.GraphModule:
    graph = fx.Graph()
    value = graph.placeholder("x")
    weight = graph.placeholder("w")
    for operator in operators:
        value = graph.call_function(operator, (value, weight) if operator is aten.mm.default else (value,))
    graph.output((value,))
    return fx.GraphModule(torch.nn.Module(), graph)


MODULES = {"layer": layer(aten.mm.default, aten.relu.default), "layer_backward": torch.nn.Identity()}
SIZE = 2 * SMALL_NBYTES
SIZES = {100: SIZE, 150: SIZE + 50, 4196: SIZE + 4096}
LARGE = {
    name: replace(
        memory,
        steps=tuple(replace(step, nbytes=SIZES.get(step.nbytes, step.nbytes)) for step in memory.steps),
        storage_nbytes=tuple(SIZES.get(n, n) for n in memory.storage_nbytes),
    )
    for name, memory in MEMORIES.items()
}


def programs() -> dict[str, PhaseProgram]:
    """The hand-written step of `verify_cases`, whose saved values are large enough to leave."""
    forward, backward = forward_program(), backward_program()
    sized = [
        replace(p, storages={s: SIZE if n == 100 else n for s, n in p.storages.items()}) for p in (forward, backward)
    ]
    saved = {name: name for name in backward.inputs if name != "g4"}
    values = frozenset(f"x{i}" for i in range(5))
    forward = replace(sized[0], plain=values, outputs=("x4", *saved))
    return {"forward": forward, "backward": replace(sized[1], saved_as=saved)}


@dataclass
class Step:
    """A planned step that drops saved values, its graphs, and what the verifier is told."""

    graphs: dict[str, fx.GraphModule]
    programs: dict[str, PhaseProgram]
    dropped: RecomputeSpec
    budget_nbytes: int
    plan: Any

    def violations(self) -> list[str]:
        return verify_recompute(self.graphs, self.programs, MODULES, self.dropped)

    def node(self, phase: str, target: Any, number: int = 0) -> fx.Node:
        """Return a node on a saved storage."""
        nodes = (n for n in self.graphs[phase].graph.nodes if n.target is target)
        return [n for n in nodes if isinstance(n.args[0], SavedStorage)][number]

    def call(self, phase: str, name: str) -> fx.Node:
        return next(n for n in self.graphs[phase].graph.nodes if n.meta.get("call") == name)

    def placeholder(self, phase: str, name: str) -> fx.Node:
        return next(n for n in self.graphs[phase].graph.nodes if n.op == "placeholder" and n.target == name)

    def change(self, node: fx.Node, place: int, value: Any) -> None:
        args = list(node.args)
        args[place] = value
        node.args = tuple(args)

    @property
    def returned(self) -> fx.Node:
        return next(iter(reversed(self.graphs["forward"].graph.nodes)))


def step(gone: Collection[str] = GONE, home: frozenset[str] = frozenset()) -> Step:
    source = programs()
    pair = with_recompute(Recomputable(source["forward"], source["backward"], frozenset()), gone)
    saved = [one for one in candidates(*pair) if one.storage in home]
    lean = {name: with_offloaded(program, home) for name, program in zip(source, pair)}
    group_of = LAYOUT.group_of()
    line = {name: positions(p, LARGE, group_of=group_of) for name, p in lean.items()}
    budget = Room.of(LAYOUT, HUGE).check_minimum((*line["forward"], *line["backward"]))
    plan = plan_phases(
        list(line.items()),
        Room.of(LAYOUT, budget),
        hardware=HARDWARE,
        boundary_nbytes=3 * SIZE,
        saved=saved,
    )
    graphs = {
        phase.phase: insert_events(lean[phase.phase], phase, MODULES, group_of=group_of, resident=frozenset())
        for phase in plan.phases
    }
    forward = pair[0]
    extra = tuple(v for v in forward.outputs[len(forward.outputs) - forward.num_extra :] if v is not None)
    return Step(graphs, source, RecomputeSpec(forward.remade, extra, home), budget, plan)


def check_peaks(s: Step) -> None:
    """Check that a step is accepted, and that each phase's peak is the verifier's, to the byte."""
    assert s.violations() == []
    for phase in s.plan.phases:
        before, after = (frozenset(), s.plan.kept) if phase.phase == "forward" else (s.plan.kept, frozenset())
        options: dict[str, Any] = {"resident": frozenset(), "external_nbytes": 0, "layout": LAYOUT, "memories": LARGE}
        options |= {"present": before, "kept": after, "offloaded": s.dropped.offloaded}
        peak_nbytes = max(moment.nbytes for moment in phase.moments)
        graph = s.graphs[phase.phase].graph
        assert verify_phase(graph, budget_nbytes=peak_nbytes, **options) == []
        assert any(v.startswith("budget") for v in verify_phase(graph, budget_nbytes=peak_nbytes - 1, **options))


def test_a_plan_is_accepted_and_its_peak_is_the_walks() -> None:
    s = step()
    check_peaks(s)
    assert [n.meta["call"] for n in s.graphs["backward"].graph.nodes if n.op == "call_module"] == [
        *("rerun.0", "rerun.1", "rerun.2"),
        *(f"backward.{i}" for i in range(4)),
    ]


def test_what_makes_the_same_of_the_same_values_may_be_called_instead() -> None:
    s = step()
    s.graphs["backward"].add_submodule("part", layer(aten.mm.default, aten.relu.default))
    s.call("backward", "rerun.0").target = "part"
    assert s.violations() == []


Sabotage = Callable[[Step], Any]
BY_RULE: dict[str, dict[str, Sabotage]] = {
    "draws random numbers": {
        "a_segment_that_draws_is_called_again": lambda s: s.graphs["backward"].set_submodule(
            "layer", layer(aten.mm.default, aten.bernoulli.default)
        ),
        "a_segment_that_changes_its_input_is_called_again": lambda s: s.graphs["backward"].set_submodule(
            "layer", layer(aten.relu_.default)
        ),
        "a_segment_in_which_ranks_meet_is_called_again": lambda s: s.graphs["backward"].set_submodule(
            "layer", layer(torch.ops._c10d_functional.wait_tensor.default)
        ),
        "an_opaque_segment_is_called_again": lambda s: s.graphs["backward"].set_submodule("layer", torch.nn.Identity()),
    },
    "only the placeholder of": {
        "a_repeated_call_reads_what_is_not_there": lambda s: s.change(
            s.call("backward", "rerun.1"), 0, s.placeholder("backward", "x1")
        ),
        "what_was_dropped_is_read_without_a_rerun": lambda s: s.change(
            s.call("backward", "backward.0"), 1, s.placeholder("backward", "x3")
        ),
    },
    "should be read": {
        "a_repeated_call_reads_another_value": lambda s: s.change(
            s.call("backward", "rerun.1"), 0, s.placeholder("backward", "x0")
        ),
        "a_repeated_call_reads_another_parameter": lambda s: s.change(
            s.call("backward", "rerun.1"), 1, s.call("backward", "rerun.0").args[1]
        ),
        "a_call_reads_what_another_one_needs": lambda s: s.change(
            s.call("backward", "backward.0"), 1, s.call("backward", "backward.1").args[1]
        ),
    },
    "has changed since": {
        "a_buffer_that_has_changed_is_read_again": lambda s: s.programs.update(
            forward=replace(s.programs["forward"], changing=frozenset({"x0"}))
        ),
    },
    "is passed in as a value": {
        "what_was_dropped_is_taken_for_a_value": lambda s: s.placeholder("backward", "x2").meta.update(
            storage=("forward.1:0", SIZE, False)
        ),
    },
    "is no call of the captured programs": {
        "a_call_is_repeated_that_there_is_not": lambda s: s.call("backward", "rerun.0").meta.update(call="rerun.9"),
        "the_forward_repeats_a_call": lambda s: s.call("forward", "forward.1").meta.update(call="rerun.1"),
    },
    "is returned as x4": {
        "the_users_output_is_dropped": lambda s: s.change(
            s.returned, 0, (s.returned.args[0][2], *s.returned.args[0][1:])
        ),
    },
    "values are returned": {
        "less_is_returned": lambda s: s.change(s.returned, 0, s.returned.args[0][:-1]),
    },
    "was not recomputed in": {
        "another_storage_is_taken_for_it": lambda s: s.change(
            s.node("backward", chunk_ops.recompute, 1), 1, s.node("backward", chunk_ops.recompute).args[1]
        ),
        "what_was_there_before_is_taken_for_what_was_made_again": lambda s: s.change(
            s.node("backward", chunk_ops.recompute), 1, s.placeholder("backward", "x0")
        ),
    },
    "not all placeholders are of values": {
        "what_stands_for_another_value_is_taken_for_it": lambda s: s.change(
            s.node("backward", chunk_ops.recompute), 2, s.placeholder("backward", "x2")
        ),
    },
    "is dropped with other values": {
        "another_value_is_dropped": lambda s: s.change(
            s.node("forward", chunk_ops.evict), 1, s.node("forward", chunk_ops.evict, 1).args[1]
        ),
    },
}
SABOTAGES: dict[str, tuple[str, Sabotage]] = {
    name: (rule, break_it) for rule, rows in BY_RULE.items() for name, break_it in rows.items()
}


def sabotage(says: str) -> Callable[[Sabotage], Sabotage]:
    def register(function: Sabotage) -> Sabotage:
        SABOTAGES[function.__name__] = (says, function)
        return function

    return register


@sabotage("computes other values than layer, which forward.0 calls")
def another_segment_is_called(s: Step) -> None:
    s.call("backward", "rerun.0").target = "layer_backward"


@sabotage("part computes other values than layer, which forward.0 calls")
def a_part_with_another_operation_is_called(s: Step) -> None:
    s.graphs["backward"].add_submodule("part", layer(aten.mm.default, aten.sigmoid.default))
    s.call("backward", "rerun.0").target = "part"


@sabotage("part computes other values than layer, which forward.0 calls")
def a_part_of_other_values_is_called(s: Step) -> None:
    s.graphs["backward"].add_submodule("part", layer(aten.mm.default, aten.relu.default))
    call = s.call("backward", "rerun.0")
    call.target, call.args = "part", call.args[::-1]


@sabotage("is returned as x0")
def what_repeated_calls_read_is_not_returned(s: Step) -> None:
    (values,) = s.returned.args
    place = s.programs["forward"].outputs.index("x0")
    s.returned.args = (tuple(None if at == place else value for at, value in enumerate(values)),)


@sabotage("should be read")
def what_repeated_calls_read_is_not_handed_over(s: Step) -> None:
    """The segment's input comes as an extra value, and as another one than was returned."""
    s.programs = {name: replace(p) for name, p in s.programs.items()}
    forward, backward = s.programs["forward"], s.programs["backward"]
    at = forward.outputs.index("x0")
    s.programs["forward"] = replace(forward, outputs=(*forward.outputs[:at], *forward.outputs[at + 1 :]))
    saved = {name: value for name, value in backward.saved_as.items() if name != "x0"}
    inputs = {name: storage for name, storage in backward.inputs.items() if name != "x0"} | {"x0": "in:x0"}
    s.programs["backward"] = replace(backward, inputs=inputs, saved_as=saved)
    s.dropped = RecomputeSpec(s.dropped.remade, ("x4",))


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_sabotage_is_reported(name: str) -> None:
    says, break_it = SABOTAGES[name]
    s = step()
    s.graphs = copy.copy(s.graphs)
    assert s.violations() == []
    break_it(s)
    assert any(v.startswith("rerun at ") and says in v for v in s.violations()), s.violations()


MIXED: dict[str, Any] = {"gone": ("forward.1:0", "forward.2:0"), "home": frozenset({"forward.0:0"})}
"""A step whose repeated calls read what has gone home."""


def test_what_a_repeated_call_reads_may_be_at_home() -> None:
    s = step(**MIXED)
    check_peaks(s)
    back = [s.node("backward", target) for target in (chunk_ops.prefetch, chunk_ops.wait)]
    order = [*map(list(s.graphs["backward"].graph.nodes).index, (*back, s.call("backward", "rerun.1")))]
    assert order == sorted(order)


@pytest.mark.parametrize(("reads", "says"), [("x1", "only the placeholder of"), ("x0", "should be read")])
def test_a_repeated_call_reads_what_is_back_and_what_it_has_read(reads: str, says: str) -> None:
    """Neither what is not back yet, nor another value."""
    s = step(**MIXED)
    placeholders = s.graphs["backward"].graph.find_nodes(op="placeholder")
    s.change(s.call("backward", "rerun.1"), 0, next(n for n in placeholders if n.target.endswith(reads)))
    assert any(v.startswith("rerun at ") and says in v for v in s.violations()), s.violations()
