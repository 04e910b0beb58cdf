"""The verifier accepts what the planner makes, and one sabotage after another is reported by its rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from chunkc.ir import chunk_ops
from chunkc.ir.chunks import ParamSpec
from chunkc.ir.hardware import Hardware
from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK, Plan
from chunkc.ir.program import MemoryStep, PhaseProgram, SegmentCall, SegmentMemory
from chunkc.ir.verify import verify_phase
from chunkc.passes.insert import insert_events, insert_update_events
from chunkc.passes.layout import lay_out
from chunkc.passes.planning import check_minimum, fixed_nbytes, plan_phases, update_positions, update_tiles
from chunkc.passes.profile import positions
from chunkc.session import owner

HUGE = 1 << 40
NUM_LAYERS = 4
CHUNK_NBYTES = 4096
LAYOUT = lay_out([ParamSpec(f"h.{i}.w", (1024,), (1,), torch.float32, True) for i in range(NUM_LAYERS)], CHUNK_NBYTES)
HARDWARE = Hardware(1.0, 1.0, 4096.0, 4096.0)
"""A chunk takes as long as a call: copies are spread over the calls around them."""

MEMORIES = {
    # (x, w) -> y: 50 bytes of temporaries beside the 100 of y
    "layer": SegmentMemory((MemoryStep("mm", "h", 150), MemoryStep("relu", "h", 100)), (2, 2), (0,), (100,)),
    # (g, x, w) -> (dw, dx); g and x are gone before the end
    "layer_backward": SegmentMemory(
        (MemoryStep("mm", "h", 4096), MemoryStep("mm", "h", 4196)), (1, 1, 2), (0, 1), (4096, 100)
    ),
}
MODULES = {name: nn.Identity() for name in MEMORIES}


def forward_program() -> PhaseProgram:
    calls = tuple(
        SegmentCall(
            f"forward.{i}",
            "layer",
            (f"x{i}", f"w{i}"),
            (f"x{i + 1}",),
            (f"forward.{i}:0",),
            ((1, f"h.{i}.w"),),
            (),
            "h",
            1.0,
        )
        for i in range(NUM_LAYERS)
    )
    inputs = {"x0": "in:x0"} | {f"w{i}": f"in:w{i}" for i in range(NUM_LAYERS)}
    storages = dict.fromkeys(inputs.values(), 0) | {"in:x0": 100}
    storages |= {f"forward.{i}:0": 100 for i in range(NUM_LAYERS)}
    outputs = tuple(f"x{i}" for i in reversed(range(NUM_LAYERS + 1)))
    names = {f"w{i}": f"h.{i}.w" for i in range(NUM_LAYERS)}
    return PhaseProgram("forward", inputs, storages, frozenset(inputs.values()), names, calls, outputs, 1)


def backward_program() -> PhaseProgram:
    calls = tuple(
        SegmentCall(
            f"backward.{NUM_LAYERS - 1 - i}",
            "layer_backward",
            (f"g{i + 1}", f"x{i}", f"w{i}"),
            (f"dw{i}", f"g{i}"),
            (f"backward.{NUM_LAYERS - 1 - i}:0", f"backward.{NUM_LAYERS - 1 - i}:1"),
            ((2, f"h.{i}.w"),),
            ((f"dw{i}", f"h.{i}.w"),),
            "h",
            1.0,
        )
        for i in reversed(range(NUM_LAYERS))
    )
    layers = range(NUM_LAYERS)
    inputs = {f"x{i}": f"forward.{i - 1}:0" if i else "in:x0" for i in layers}
    inputs |= {f"w{i}": f"in:w{i}" for i in layers} | {f"g{NUM_LAYERS}": "in:g"}
    storages = {s: (0 if s.startswith("in:w") else 100) for s in inputs.values()}
    storages |= {f"backward.{i}:0": 4096 for i in layers} | {f"backward.{i}:1": 100 for i in layers}
    names = {f"w{i}": f"h.{i}.w" for i in layers}
    held = frozenset({"in:g", "in:x0"})
    return PhaseProgram("backward", inputs, storages, held, names, calls, (None,) * NUM_LAYERS + ("g0",), 5)


@dataclass
class Case:
    """A planned phase, its graph, and what the verifier must be told."""

    plan: Plan
    graph: fx.Graph
    options: dict[str, Any]
    names: dict[str, fx.Node] = field(default_factory=dict)

    def violations(self, **changes: Any) -> list[str]:
        return verify_phase(self.graph, layout=LAYOUT, memories=MEMORIES, **(self.options | changes))

    def rules(self, **changes: Any) -> set[str]:
        return {violation.partition(" ")[0].rstrip(":") for violation in self.violations(**changes)}

    def all(self, kind: str, chunk: str | None = None) -> list[fx.Node]:
        targets = {"parameter": chunk_ops.parameter, "sink": chunk_ops.sink, "update": chunk_ops.update}
        target = (targets | chunk_ops.EVENT_TARGETS)[kind]
        at = 1 if kind == "sink" else 0
        return [n for n in self.graph.nodes if n.target is target and (chunk is None or n.args[at] == chunk)]

    def the(self, kind: str, chunk: str, number: int = 0) -> fx.Node:
        return self.all(kind, chunk)[number]

    def call(self, name: str) -> fx.Node:
        return next(n for n in self.graph.nodes if n.meta.get("call") == name)

    def erase(self, kind: str, chunk: str, number: int = 0) -> None:
        self.graph.erase_node(self.the(kind, chunk, number))

    def add_before(self, node: fx.Node, *events: tuple[str, str]) -> None:
        with self.graph.inserting_before(node):
            for kind, chunk in events:
                self.graph.call_function(chunk_ops.EVENT_TARGETS[kind], (chunk,))

    def add_after(self, node: fx.Node, *events: tuple[str, str]) -> None:
        self.add_before(node.next, *events)


def step_positions() -> tuple[tuple, tuple]:
    group_of = LAYOUT.group_of()
    return tuple(positions(p, MEMORIES, group_of=group_of) for p in (forward_program(), backward_program()))  # type: ignore[return-value]


def plan_step(budget: int | None, spare: int = 0) -> Plan:
    forward, backward = step_positions()
    if budget is None:
        budget = check_minimum((*forward, *backward), LAYOUT, HUGE, 0) + spare
    return plan_phases(
        [("forward", forward), ("backward", backward)],
        LAYOUT,
        budget_nbytes=budget,
        resident=frozenset(),
        hardware=HARDWARE,
        boundary_nbytes=500,
    )


def case(phase: str, spare: int = 0) -> Case:
    """The forward, backward or update under the smallest budget, plus `spare` bytes."""
    fixed = fixed_nbytes(LAYOUT, frozenset())
    if phase == "update":
        tiles = update_tiles(LAYOUT, range(NUM_LAYERS), 0)
        calls = update_positions(LAYOUT, tiles, 100)
        budget = check_minimum(calls, LAYOUT, HUGE, 0) + spare
        plan = plan_phases([("update", calls)], LAYOUT, budget_nbytes=budget, resident=frozenset(), hardware=HARDWARE)
        graph = insert_update_events(plan.phases[0], tiles)
        return Case(plan, graph.graph, {"fixed_nbytes": fixed + 100, "budget_nbytes": budget})
    plan = plan_step(None, spare)
    program, index = (forward_program(), 0) if phase == "forward" else (backward_program(), 1)
    graph = insert_events(program, plan.phases[index], MODULES, group_of=LAYOUT.group_of(), resident=frozenset())
    options = {"fixed_nbytes": fixed, "budget_nbytes": plan.budget_nbytes}
    options |= {"kept": plan.kept} if phase == "forward" else {"present": plan.kept}
    return Case(plan, graph.graph, options)


PHASES = ("forward", "backward", "update")
SPARES = (0, 1, 4096, 10_000, 1 << 20)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("spare", SPARES)
def test_what_the_planner_makes_is_valid(phase: str, spare: int) -> None:
    assert case(phase, spare).violations() == []


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("spare", SPARES)
def test_bytes_are_counted_exactly(phase: str, spare: int) -> None:
    """The planner's lifetimes and the verifier's reference counts come to the same peak."""
    subject = case(phase, spare)
    peak = max(m.nbytes for p in subject.plan.phases if p.phase == phase for m in p.moments)
    assert subject.violations(budget_nbytes=peak) == []
    assert subject.rules(budget_nbytes=peak - 1) == {"budget"}


# --- one sabotage after another ---

Sabotage = Callable[[Case], Any]
SABOTAGES: dict[str, tuple[str, str, int, Sabotage]] = {}


def sabotage(rule: str, phase: str, spare: int = 0) -> Callable[[Sabotage], Sabotage]:
    def register(function: Sabotage) -> Sabotage:
        SABOTAGES[function.__name__] = (rule, phase, spare, function)
        return function

    return register


def move_before(node: fx.Node, other: fx.Node) -> None:
    other.prepend(node)


def move_after(node: fx.Node, other: fx.Node) -> None:
    other.append(node)


@sabotage("read", "forward")
def a_load_is_not_waited_for(c: Case) -> None:
    c.erase(WAIT, "param:1")


@sabotage("read", "forward")
def a_load_is_waited_for_too_late(c: Case) -> None:
    move_after(c.the(WAIT, "param:1"), c.call("forward.1"))


@sabotage("read", "forward")
def a_chunk_is_never_loaded(c: Case) -> None:
    for kind in (PREFETCH, WAIT, EVICT):
        c.erase(kind, "param:1")


@sabotage("read", "forward")
def a_slot_goes_before_its_reader(c: Case) -> None:
    move_before(c.the(EVICT, "param:1"), c.call("forward.1"))


@sabotage("read", "forward")
def a_slot_goes_before_its_view_is_made(c: Case) -> None:
    move_before(c.the(EVICT, "param:1"), c.the("parameter", "param:1"))


@sabotage("read", "forward", 1 << 20)
def a_view_is_read_after_its_chunk_came_back_into_another_slot(c: Case) -> None:
    call = c.call("forward.1")
    c.add_before(call, (EVICT, "param:1"), (PREFETCH, "param:1"), (WAIT, "param:1"))


@sabotage("read", "forward", 1 << 20)
def an_old_view_is_read_again_later(c: Case) -> None:
    late = c.call("forward.3")
    early = c.the("parameter", "param:0")
    c.add_before(late, (EVICT, "param:0"), (PREFETCH, "param:0"), (WAIT, "param:0"))
    late.args = (late.args[0], early)


@sabotage("read", "forward")
def two_loads_change_places(c: Case) -> None:
    one, two = c.the(PREFETCH, "param:0"), c.the(PREFETCH, "param:3")
    one.args, two.args = two.args, one.args


@sabotage("read", "backward")
def what_the_forward_kept_is_not_there(c: Case) -> None:
    assert c.options["present"]
    c.options["present"] = ()


@sabotage("read", "update")
def an_update_without_gradients(c: Case) -> None:
    chunk = next(n.args[0] for n in c.all(PREFETCH) if n.args[0].startswith("grad:1"))
    for kind in (PREFETCH, WAIT, EVICT):
        c.erase(kind, chunk)


@sabotage("read", "update")
def an_update_before_its_gradients_have_arrived(c: Case) -> None:
    c.erase(WAIT, next(n.args[0] for n in c.all(PREFETCH) if n.args[0].startswith("grad:1")))


@sabotage("read", "forward")
def a_result_is_a_view_of_a_slot(c: Case) -> None:
    memory = MEMORIES["layer"]
    c.call("forward.1").target = "view"
    c.names["view"] = SegmentMemory(memory.steps, memory.input_released, (-2,), ())  # type: ignore[assignment]


@sabotage("read", "forward")
def a_parameter_is_read_from_the_chunk_of_another(c: Case) -> None:
    node = c.the("parameter", "param:1")
    node.args = ("param:1", "h.2.w")


@sabotage("write", "backward")
def a_gradient_goes_into_a_slot_that_is_not_there(c: Case) -> None:
    for kind in (PREFETCH, WAIT):
        c.erase(kind, "grad:1")


@sabotage("write", "backward")
def a_gradient_goes_into_a_slot_that_is_not_ready(c: Case) -> None:
    c.erase(WAIT, "grad:1")


@sabotage("write", "backward")
def a_gradient_is_sunk_before_the_wait(c: Case) -> None:
    move_after(c.the(WAIT, "grad:1"), c.the("sink", "grad:1"))


@sabotage("write", "backward")
def a_gradient_is_sunk_after_its_slot_went(c: Case) -> None:
    move_after(c.the("sink", "grad:1"), c.the(EVICT, "grad:1"))


@sabotage("write", "backward")
def a_gradient_is_sunk_during_the_write_back(c: Case) -> None:
    move_before(c.the(WRITE_BACK, "grad:1"), c.the("sink", "grad:1"))


@sabotage("write", "backward")
def a_gradient_goes_into_the_chunk_of_another(c: Case) -> None:
    node = c.the("sink", "grad:1")
    node.args = ("h.2.w", *node.args[1:])


@sabotage("write", "update")
def an_update_during_the_write_back_of_a_state(c: Case) -> None:
    node = c.all("update")[1]
    chunk = next(n.args[0] for n in c.all(WRITE_BACK) if n.args[0].startswith("exp_avg:1"))
    move_before(c.the(WRITE_BACK, chunk), node)


@sabotage("write", "update")
def an_update_without_its_parameters(c: Case) -> None:
    chunk = next(n.args[0] for n in c.all(PREFETCH) if n.args[0].startswith("param:1"))
    for node in [n for kind in (PREFETCH, WAIT, WRITE_BACK, EVICT) for n in c.all(kind, chunk)]:
        c.graph.erase_node(node)


@sabotage("write", "update")
def an_update_of_other_elements(c: Case) -> None:
    node = c.all("update")[0]
    node.args = (node.args[0], 0, 512)


@sabotage("slot", "forward", 4096)
def a_slot_goes_while_its_load_is_under_way(c: Case) -> None:
    move_before(c.the(EVICT, "param:1"), c.the(WAIT, "param:1"))


@sabotage("slot", "backward")
def a_slot_goes_while_its_write_back_is_under_way(c: Case) -> None:
    c.erase(WAIT, "grad:1", 1)


@sabotage("slot", "update")
def a_states_slot_goes_while_its_write_back_is_under_way(c: Case) -> None:
    chunk = next(n.args[0] for n in c.all(WRITE_BACK) if n.args[0].startswith("exp_avg_sq:2"))
    c.erase(WAIT, chunk, 1)


@sabotage("dirty", "backward")
def a_gradient_is_never_written_back(c: Case) -> None:
    c.erase(WRITE_BACK, "grad:1")


@sabotage("dirty", "backward")
def a_gradient_is_written_back_before_it_is_there(c: Case) -> None:
    sink = c.the("sink", "grad:1")
    move_before(c.the(WRITE_BACK, "grad:1"), sink)
    move_before(c.the(WAIT, "grad:1", 1), sink)


@sabotage("dirty", "backward")
def a_second_gradient_comes_after_the_write_back(c: Case) -> None:
    sink, evict = c.the("sink", "grad:1"), c.the(EVICT, "grad:1")
    with c.graph.inserting_before(evict):
        c.graph.call_function(chunk_ops.sink, sink.args)


@sabotage("dirty", "update")
def new_parameters_are_never_written_back(c: Case) -> None:
    c.graph.erase_node(next(n for n in c.all(WRITE_BACK) if n.args[0].startswith("param:1")))


@sabotage("state", "forward", 1 << 20)
def a_chunk_is_loaded_twice(c: Case) -> None:
    c.add_after(c.the(PREFETCH, "param:1"), (PREFETCH, "param:1"))


@sabotage("state", "backward")
def a_chunk_that_the_forward_kept_is_loaded_again(c: Case) -> None:
    c.add_before(next(iter(c.graph.nodes)), (PREFETCH, next(iter(c.options["present"]))))


@sabotage("state", "forward")
def a_wait_for_nothing(c: Case) -> None:
    c.add_after(c.the(EVICT, "param:0"), (WAIT, "param:0"))


@sabotage("state", "forward")
def a_wait_before_its_load(c: Case) -> None:
    move_before(c.the(WAIT, "param:1"), c.the(PREFETCH, "param:1"))


@sabotage("state", "forward")
def a_slot_goes_twice(c: Case) -> None:
    c.add_after(c.the(EVICT, "param:0"), (EVICT, "param:0"))


@sabotage("state", "backward")
def a_write_back_of_nothing(c: Case) -> None:
    c.add_after(c.the(EVICT, "grad:1"), (WRITE_BACK, "grad:1"))


@sabotage("state", "backward")
def two_write_backs_at_once(c: Case) -> None:
    c.add_after(c.the(WRITE_BACK, "grad:1"), (WRITE_BACK, "grad:1"))


@sabotage("state", "forward")
def a_write_back_of_a_slot_that_is_still_loading(c: Case) -> None:
    c.add_after(c.the(PREFETCH, "param:1"), (WRITE_BACK, "param:1"))


@sabotage("state", "forward")
def something_that_is_no_chunk_operation(c: Case) -> None:
    with c.graph.inserting_before(c.call("forward.0")):
        c.graph.call_function(torch.relu, ())


@sabotage("budget", "backward")
def one_byte_less(c: Case) -> None:
    c.options["budget_nbytes"] -= 1


@sabotage("budget", "update")
def one_byte_more_of_others(c: Case) -> None:
    c.options["fixed_nbytes"] += 1


@sabotage("budget", "update")
def a_slot_stays_too_long(c: Case) -> None:
    evict = next(n for n in c.all(EVICT) if n.args[0].startswith("grad:0"))
    move_before(evict, next(iter(reversed(c.graph.nodes))))


@sabotage("budget", "backward")
def a_load_starts_too_early(c: Case) -> None:
    early = c.call("backward.0")
    move_before(c.the(PREFETCH, "param:0"), early)
    move_before(c.the(PREFETCH, "grad:0"), early)


@sabotage("budget", "backward")
def a_value_is_read_again_later(c: Case) -> None:
    """The first gradient is still read by a later call: it lives on."""
    gradient, late = c.the("sink", "grad:3").args[2], c.call("backward.3")
    late.args = (gradient, *late.args[1:])


@sabotage("budget", "backward")
def a_call_needs_more_than_planned(c: Case) -> None:
    memory = MEMORIES["layer_backward"]
    more = (MemoryStep("mm", "h", 4197), *memory.steps[1:])
    c.names["layer_backward"] = SegmentMemory(more, memory.input_released, memory.outputs, memory.storage_nbytes)  # type: ignore[assignment]


@sabotage("end", "backward")
def the_last_slot_is_not_given_back(c: Case) -> None:
    c.graph.erase_node(c.all(EVICT)[-1])


@sabotage("end", "forward")
def what_should_be_kept_is_given_back(c: Case) -> None:
    kept = next(iter(c.options["kept"]))
    c.add_before(next(iter(reversed(c.graph.nodes))), (EVICT, kept))


@sabotage("end", "forward")
def more_is_kept_than_should_be(c: Case) -> None:
    c.options["kept"] = ()


@sabotage("end", "backward", 1 << 20)
def the_end_comes_during_a_write_back(c: Case) -> None:
    c.options["kept"] = {"grad:0"}
    c.erase(EVICT, "grad:0")
    c.erase(WAIT, "grad:0", 1)


@sabotage("end", "backward", 1 << 20)
def the_end_leaves_a_dirty_chunk(c: Case) -> None:
    c.options["kept"] = {"grad:0"}
    for node in (c.the(EVICT, "grad:0"), c.the(WAIT, "grad:0", 1), c.the(WRITE_BACK, "grad:0")):
        c.graph.erase_node(node)


@sabotage("end", "forward", 1 << 20)
def the_end_comes_during_a_load(c: Case) -> None:
    c.options["kept"] = {*c.options["kept"], "grad:0"}
    c.add_before(next(iter(reversed(c.graph.nodes))), (PREFETCH, "grad:0"))


@pytest.mark.parametrize("name", SABOTAGES)
def test_sabotage_is_reported_by_its_rule(name: str) -> None:
    rule, phase, spare, break_it = SABOTAGES[name]
    subject = case(phase, spare)
    assert subject.violations() == []
    break_it(subject)
    memories: Mapping[str, Any] = MEMORIES | subject.names
    found = verify_phase(subject.graph, layout=LAYOUT, memories=memories, **subject.options)
    assert any(violation.startswith(rule) for violation in found), found or "nothing was reported"


def test_every_rule_of_the_verifier_is_sabotaged() -> None:
    from chunkc.ir import verify

    rules = {line.split()[0] for line in (verify.__doc__ or "").splitlines() if line.startswith("    ")}
    assert rules == {rule for rule, *_ in SABOTAGES.values()}


# --- random sabotage, judged by running ---


@dataclass
class _Copy:
    """A slot as memory: what is in it, and the copy that has not ended."""

    content: int | None = None
    copying: str = ""


def run_is_safe(subject: Case) -> bool:
    """Run the graph on version numbers; copies end as late as they can, what is read or kept must be new."""
    newest: dict[str, int] = {}
    home: dict[str, int] = {}
    slots: dict[str, _Copy] = {chunk: _Copy(0) for chunk in subject.options.get("present", ())}
    views: dict[fx.Node, _Copy | None] = {}

    def write(chunk: str) -> bool:
        slot = slots.get(chunk)
        if slot is None or slot.copying or slot.content is None:
            return False
        slot.content = newest[chunk] = newest.get(chunk, 0) + 1
        return True

    for node in subject.graph.nodes:
        if node.op == "call_module":
            for arg in node.args:
                if arg in views:
                    slot, chunk = views[arg], arg.args[0]
                    if slot is None or slots.get(chunk) is not slot or slot.content != newest.get(chunk, 0):
                        return False
            continue
        if node.op != "call_function" or node.target.__module__ != chunk_ops.__name__:
            continue
        kind, chunk = node.target.__name__, node.args[0]
        if kind == "sink":
            if not write(node.args[1]):
                return False
        elif kind == "update":
            group, begin, end = node.args
            gradient = slots.get(f"grad:{group}[{begin}:{end}]")
            if gradient is None or gradient.content is None:
                return False
            if not all(write(f"{k}:{group}[{begin}:{end}]") for k in ("param", "exp_avg", "exp_avg_sq")):
                return False
        elif kind == "parameter":
            views[node] = slots.get(chunk)
        elif kind == PREFETCH:
            if chunk in slots:
                return False
            slots[chunk] = _Copy(None, "in")
        elif chunk not in slots:
            return False
        elif kind == WAIT:
            slot = slots[chunk]
            if slot.copying == "in":
                slot.content = home.get(chunk, 0)
            elif slot.copying == "out":
                assert slot.content is not None
                home[chunk] = slot.content
            slot.copying = ""
        elif kind == WRITE_BACK:
            slot = slots[chunk]
            if slot.copying or slot.content is None:
                return False
            slot.copying = "out"
        elif kind == EVICT and slots.pop(chunk).copying:
            return False
    lost = [chunk for chunk, version in newest.items() if chunk not in slots and home.get(chunk, 0) != version]
    stale = [chunk for chunk, slot in slots.items() if slot.copying or home.get(chunk, 0) != newest.get(chunk, 0)]
    return not lost and not stale and set(slots) == set(subject.options.get("kept", ()))


def events_of(subject: Case) -> list[fx.Node]:
    return [n for n in subject.graph.nodes if n.target in (*chunk_ops.EVENT_TARGETS.values(), chunk_ops.sink)]


@pytest.mark.parametrize("phase", PHASES)
def test_the_judge_finds_nothing_wrong_with_a_valid_plan(phase: str) -> None:
    for spare in SPARES:
        assert run_is_safe(case(phase, spare))


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(PHASES),
    st.sampled_from(SPARES),
    st.lists(
        st.tuples(st.sampled_from(["delete", "swap", "move", "repeat"]), *[st.integers(0, 10**6)] * 2),
        min_size=1,
        max_size=2,
    ),
)
def test_random_sabotage_is_reported_unless_it_is_harmless(
    phase: str, spare: int, mutations: list[tuple[str, int, int]]
) -> None:
    subject = case(phase, spare)
    subject.options["budget_nbytes"] = HUGE  # the judge does not count bytes
    for kind, one, two in mutations:
        nodes = events_of(subject)
        node, other = nodes[one % len(nodes)], nodes[two % len(nodes)]
        if kind == "delete":
            subject.graph.erase_node(node)
        elif node.target is chunk_ops.sink or other.target is chunk_ops.sink:
            continue  # a gradient cannot be sunk before it is made
        elif kind == "swap":
            node.args, other.args, node.target, other.target = (
                other.args,
                node.args,
                other.target,
                node.target,
            )
        elif kind == "move" and node is not other:
            other.prepend(node)
        elif kind == "repeat":
            with subject.graph.inserting_before(other):
                subject.graph.call_function(node.target, node.args)
    if not run_is_safe(subject):
        assert subject.violations(), "an unsafe graph passes"


def test_deleting_any_single_event_is_reported() -> None:
    """A plan holds nothing that it could do without, but for sinks, which the graph alone cannot miss."""
    for phase in PHASES:
        for number in range(len([n for n in events_of(case(phase)) if n.target is not chunk_ops.sink])):
            subject = case(phase)
            node = [n for n in events_of(subject) if n.target is not chunk_ops.sink][number]
            text = f"{phase}: {node.target.__name__}{node.args}"
            subject.graph.erase_node(node)
            assert subject.violations(), f"without {text} the graph passes"


# --- on a model that is really compiled ---


class _Model(nn.Module):
    """Its backward needs neither its input nor its output: both are the caller's all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * 3


def test_bytes_of_a_compiled_model_are_counted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a phase's predicted peak nothing is reported, one byte below it is: what the caller holds counts."""
    import chunkc.captured as captured_module

    seen: dict[str, tuple[fx.Graph, dict[str, Any]]] = {}

    def recording(graph: fx.Graph, **options: Any) -> list[str]:
        phase = next(n for n in graph.nodes if n.op == "call_module").meta["call"].partition(".")[0]
        seen[phase] = (graph, options)
        return verify_phase(graph, **options)

    monkeypatch.setattr(captured_module, "verify_phase", recording)
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {
        "memory_budget": 400_000,
        "home": "cpu",
        "codegen": "eager",
        "chunk_size": 16640,
        "whole_graph": "never",
    }
    plain = _Model()
    torch.compile(plain, backend="chunkc", options=options)(torch.randn(32, 64)).sum().backward()
    hit = owner(plain.layers[0].weight)
    assert hit is not None
    assert set(seen) == {"forward", "backward"}
    for phase, (graph, found) in seen.items():
        plan = hit[0].records[phase].plan.accumulating()  # the budget holds with earlier gradients too
        peak = max(moment.nbytes for moment in plan.moments if moment.phase == phase)
        assert verify_phase(graph, **(found | {"budget_nbytes": peak})) == []
        below = verify_phase(graph, **(found | {"budget_nbytes": peak - 1}))
        assert below, f"the {phase} needs {peak:,} bytes, and passes with one less"
