"""A step of four layers in four chunks, written by hand, with valid plans of it: what the verifier's tests break."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from program_cases import phase_program, segment_call
from torch import fx, nn

from chunkc.ir import chunk_ops
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import ParamSpec
from chunkc.ir.links import TO_DEVICE, TO_HOME, host_links
from chunkc.ir.plan import EVICT, WRITE_BACK, Plan
from chunkc.ir.program import MemoryStep, PhaseProgram, SegmentMemory
from chunkc.ir.verify.verifier import verify_phase
from chunkc.passes.codegen import CompiledSegment
from chunkc.passes.memory.profile import positions
from chunkc.passes.planning.layout import lay_out
from chunkc.passes.planning.room import Room
from chunkc.passes.planning.timeline import plan_phases
from chunkc.passes.planning.updates import update_positions, update_tiles
from chunkc.passes.planning.updates_in_backward import with_updates
from chunkc.passes.rewrite.insert import insert_events, insert_update_events
from chunkc.policy.captured_step import Captured

HUGE = 1 << 40
NUM_LAYERS = 4
CHUNK_NBYTES = 4096
LAYOUT = lay_out([ParamSpec(f"h.{i}.w", (1024,), (1,), torch.float32, True) for i in range(NUM_LAYERS)], CHUNK_NBYTES)
HARDWARE = Hardware(1.0, 1.0, host_links(4096.0, 4096.0))
"""A chunk takes as long as a call: copies are spread over the calls around them."""
MEMORIES = {
    # (x, w) -> y: 50 bytes of temporaries, and the 100 of y
    "layer": SegmentMemory((MemoryStep("mm", "h", 150), MemoryStep("relu", "h", 100)), (2, 2), (0,), (100,)),
    # (g, x, w) -> (dw, dx); g and x are gone before the end
    "layer_backward": SegmentMemory(
        (MemoryStep("mm", "h", 4096), MemoryStep("mm", "h", 4196)), (1, 1, 2), (0, 1), (4096, 100)
    ),
}
MODULES = {name: nn.Identity() for name in MEMORIES}


def forward_program() -> PhaseProgram:
    calls = tuple(
        segment_call(
            f"forward.{i}",
            f"x{i} w{i}",
            f"x{i + 1}",
            f"forward.{i}:0",
            "layer",
            parameters=((1, f"h.{i}.w"),),
            module="h",
        )
        for i in range(NUM_LAYERS)
    )
    inputs = {"x0": "in:x0"} | {f"w{i}": f"in:w{i}" for i in range(NUM_LAYERS)}
    storages = dict.fromkeys(inputs.values(), 0) | {"in:x0": 100}
    storages |= {f"forward.{i}:0": 100 for i in range(NUM_LAYERS)}
    outputs = tuple(f"x{i}" for i in reversed(range(NUM_LAYERS + 1)))
    names = {f"w{i}": f"h.{i}.w" for i in range(NUM_LAYERS)}
    return phase_program("forward", inputs, storages, calls, outputs, parameters=names)


def backward_program() -> PhaseProgram:
    calls = tuple(
        segment_call(
            f"backward.{at}", f"g{i + 1} x{i} w{i}", f"dw{i} g{i}", f"backward.{at}:0 backward.{at}:1",
            "layer_backward", parameters=((2, f"h.{i}.w"),), gradients=((f"dw{i}", f"h.{i}.w"),), module="h",
        )
        for at, i in enumerate(reversed(range(NUM_LAYERS)))
    )  # fmt: skip
    layers = range(NUM_LAYERS)
    inputs = {f"x{i}": f"forward.{i - 1}:0" if i else "in:x0" for i in layers}
    inputs |= {f"w{i}": f"in:w{i}" for i in layers} | {f"g{NUM_LAYERS}": "in:g"}
    storages = {s: (0 if s.startswith("in:w") else 100) for s in inputs.values()}
    storages |= {f"backward.{i}:0": 4096 for i in layers} | {f"backward.{i}:1": 100 for i in layers}
    names = {f"w{i}": f"h.{i}.w" for i in layers}
    held = frozenset({"in:g", "in:x0"})
    return PhaseProgram("backward", inputs, storages, held, names, calls, (None,) * NUM_LAYERS + ("g0",), 5)


def give(node: fx.Node, *arguments: object) -> None:
    """Give a node other arguments."""
    node.args = arguments  # type: ignore[assignment]


def captured_step() -> Captured:
    """Return the step as `policy` gets it, cut into segments."""
    segments = {name: CompiledSegment(MODULES[name], memory) for name, memory in MEMORIES.items()}
    return Captured(forward_program(), backward_program(), segments, MODULES, whole=False)


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
        targets = {
            "parameter": chunk_ops.parameter,
            "sink": chunk_ops.sink,
            "update": chunk_ops.update,
            "settle": chunk_ops.settle,
        }
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
                links = () if kind == EVICT else (TO_HOME if kind == WRITE_BACK else TO_DEVICE,)
                self.graph.call_function(chunk_ops.EVENT_TARGETS[kind], (chunk, *links))

    def add_after(self, node: fx.Node, *events: tuple[str, str]) -> None:
        self.add_before(node.next, *events)


def casting_program() -> PhaseProgram:
    """Return the forward, which reads every parameter but the first as a cast."""
    return replace(forward_program(), read_as={f"h.{i}.w": "param_bf16" for i in range(1, NUM_LAYERS)})


def step_positions() -> tuple[tuple, tuple]:
    group_of = LAYOUT.group_of()
    return tuple(positions(p, MEMORIES, group_of=group_of) for p in (forward_program(), backward_program()))  # type: ignore[return-value]


def plan_step(
    budget: int | None,
    spare: int = 0,
    updates: Mapping[int, int] = MappingProxyType({}),
    undoable: Collection[int] = (),
) -> Plan:
    """Return the plan of forward and backward, which updates groups in so many stages, some undoably."""
    forward, backward = step_positions()
    if budget is None:
        budget = Room.of(LAYOUT, HUGE).check_minimum((*forward, *backward)) + spare
    backward = with_updates(
        backward,
        Room.of(LAYOUT, budget),
        updates,
        undoable=undoable,
        hardware=HARDWARE,
    )
    return plan_phases(
        [("forward", forward), ("backward", backward)],
        Room.of(LAYOUT, budget),
        hardware=HARDWARE,
        boundary_nbytes=500,
    )


def case(phase: str, spare: int = 0) -> Case:
    """Return the forward, backward or update under the smallest budget, plus `spare` bytes.

    `settling`: the backward, with instructions where groups are settled at home. `updating`: the backward, which
    updates all groups. `casting`: a forward that reads casts.
    """
    if phase == "casting":
        program = casting_program()
        calls = positions(program, MEMORIES, group_of=LAYOUT.group_of())
        budget = Room.of(LAYOUT, HUGE).check_minimum(calls) + spare
        plan = plan_phases([("forward", calls)], Room.of(LAYOUT, budget), hardware=HARDWARE)
        graph = insert_events(program, plan.phases[0], MODULES, group_of=LAYOUT.group_of(), resident=frozenset()).graph
        return Case(plan, graph, {"resident": frozenset(), "external_nbytes": 0, "budget_nbytes": budget})
    if phase == "update":
        tiles = update_tiles(LAYOUT, range(NUM_LAYERS), 0)
        calls = update_positions(LAYOUT, tiles, 100)
        budget = Room.of(LAYOUT, HUGE).check_minimum(calls) + spare
        plan = plan_phases([("update", calls)], Room.of(LAYOUT, budget), hardware=HARDWARE)
        graph = insert_update_events(plan.phases[0], tiles)
        return Case(plan, graph, {"resident": frozenset(), "external_nbytes": 100, "budget_nbytes": budget})
    plan = plan_step(None, spare, dict.fromkeys(range(NUM_LAYERS), 1) if phase == "updating" else {})
    program, index = (forward_program(), 0) if phase == "forward" else (backward_program(), 1)
    graph = insert_events(
        program,
        plan.phases[index],
        MODULES,
        group_of=LAYOUT.group_of(),
        resident=frozenset(),
        layout=LAYOUT if phase == "settling" else None,
    )
    options: dict[str, Any] = {"resident": frozenset(), "external_nbytes": 0, "budget_nbytes": plan.budget_nbytes}
    options |= {"kept": plan.kept} if phase == "forward" else {"present": plan.kept}
    if phase == "updating":
        options |= {"updates": range(NUM_LAYERS)}
    return Case(plan, graph.graph, options)


PHASES = ("forward", "backward", "update", "casting")
SPARES = (0, 1, 4096, 10_000, 1 << 20)
