"""Program and plan into an FX graph with chunk nodes: what the verifier checks, the runtime lowers and people read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import fx, nn

from chunkc.ir import chunk_ops
from chunkc.ir.items import SavedStorage
from chunkc.ir.layout import GRAD, Chunk, ChunkLayout
from chunkc.ir.plan import EVICT, WAIT, Event, PhasePlan, Tile
from chunkc.ir.program import FORWARD, PhaseProgram, SegmentCall
from chunkc.torch_private.aot import LazyGraphModule


def insert_events(
    program: PhaseProgram,
    plan: PhasePlan,
    segments: Mapping[str, nn.Module],
    *,
    group_of: Mapping[str, int],
    resident: frozenset[int],
    layout: ChunkLayout | None = None,
) -> fx.GraphModule:
    """Build the rewritten graph of one phase; with a `layout`, reporting when gradients of its groups are complete.

    Placeholders carry `meta["storage"] = (name, bytes, held)`, for the verifier. A gradient is owned by its sink when
    the program hands it over. Offloaded and recomputed values are replaced by stand-ins between the phases.
    """
    graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    for value, storage in program.inputs.items():
        node = graph.placeholder(value)
        node.meta["storage"] = (storage, program.storages[storage], storage in program.held)
        if storage in program.remade:
            node.meta["storage"] = (f"dropped:{value}", 0, False)
        node.meta["parameter"] = program.parameters.get(value)
        values[value] = node
    complete = {} if layout is None else complete_after(program, plan, layout, resident)
    saved = _Saved(graph, program, values)
    calls = iter(program.calls)
    for at, stop in enumerate(plan.stops[:-1]):
        _events(graph, stop, at, complete, saved)
        if at in plan.tiles:
            _node(graph, chunk_ops.update, *_arguments(plan.tiles[at]))
            continue
        call = next(calls)
        args = [values[value] for value in call.inputs]
        for position, name in call.parameters:
            group = group_of.get(name)
            if group is not None and (read := program.chunk(name, group)).has_own_slot(resident):
                args[position] = _node(graph, chunk_ops.parameter, read, name)
        result = graph.call_module(call.segment, tuple(args))
        result.meta["call"] = call.name
        for index, value in enumerate(call.outputs):
            values[value] = _node(graph, operator.getitem, result, index)
        saved.after(call)
        for value, name in call.gradients:
            group = group_of.get(name)
            chunk = None if group is None or group in resident else Chunk(GRAD, group)
            _node(graph, chunk_ops.sink, name, chunk, values[value], value in program.handed_over)
    _events(graph, plan.stops[-1], len(plan.stops) - 1, complete, saved)
    outputs = [None if value is None else values[value] for value in program.outputs]
    for position, (storage, index) in program.stand_ins.items():
        outputs[position] = _node(graph, operator.getitem, saved.left[storage], index)
    graph.output(tuple(outputs))
    root = nn.Module()
    for call in program.calls:
        if not hasattr(root, call.segment):
            root.add_module(call.segment, segments[call.segment])
    return LazyGraphModule(root, graph, f"chunkc_{program.phase}")


def insert_update_events(plan: PhasePlan, tiles: Sequence[Tile]) -> fx.Graph:
    """Build the graph of an optimizer's step over `tiles`, one fused update each, with the events of `plan`."""
    graph = fx.Graph()
    for tile, stop in zip(tiles, plan.stops):
        _events(graph, stop)
        _node(graph, chunk_ops.update, *_arguments(tile))
    _events(graph, plan.stops[-1])
    graph.output(())
    return graph


def _arguments(tile: Tile) -> tuple[int, ...]:
    elements = (tile.group, tile.begin, tile.end)
    return elements if tile.num_stages == 1 else (*elements, tile.stage, tile.num_stages)


def _node(graph: fx.Graph, target: Callable[..., Any], *arguments: Any) -> fx.Node:
    """Create a chunk node. Its arguments may be chunks, though FX has no type for them.

    The arguments are set after its creation: FX would search them for symbolic sizes, which takes most of the time.
    """
    node = graph.create_node("call_function", target, name=target.__name__)
    node.args = arguments
    return node


def complete_after(
    program: PhaseProgram, plan: PhasePlan, layout: ChunkLayout, resident: Collection[int] = ()
) -> dict[tuple[int, int], int]:
    """Return the groups with complete gradients by the event, (stop, place in it), after which they are complete.

    That is the last event that starts a copy of the group's parameters or gradients, either way. Only groups count
    that move, with gradients that this program sinks all, and that the phase does not update itself.
    """
    sunk = {name for call in program.calls for _, name in call.gradients}
    return {
        where: index
        for index, where in plan.last_copies().items()
        if index not in plan.updated
        and index not in resident
        and layout.groups[index].trainable
        and all(s.spec.name in sunk for s in layout.groups[index].slices)
    }


class _Saved:
    """The nodes of storages that are offloaded or recomputed between the phases.

    Attributes:
        left: storage -> the node that evicts it.
    """

    def __init__(self, graph: fx.Graph, program: PhaseProgram, values: dict[str, fx.Node]) -> None:
        self._graph, self._program, self._values = graph, program, values
        self._copies: dict[str, fx.Node] = {}
        self.left: dict[str, fx.Node] = {}
        self._made: set[str] = set()

    def after(self, call: SegmentCall) -> None:
        """Insert, behind a call, the drop of each storage with all its saved values, or its return."""
        for storage in dict.fromkeys(call.output_storages):
            names = self._program.remade.get(storage, ())
            if self._program.phase == FORWARD:
                if names and storage not in self.left and all(name in self._values for name in names):
                    held = tuple(self._values[name] for name in names)
                    self.left[storage] = _node(self._graph, chunk_ops.evict, SavedStorage(storage), *held)
            elif names and storage not in self._made:
                self._made.add(storage)
                made = self._values[call.outputs[call.output_storages.index(storage)]]
                held = tuple(self._values[name] for name in names)
                self._back(_node(self._graph, chunk_ops.recompute, SavedStorage(storage), made, *held), names)

    def insert(self, event: Event) -> None:
        storage, names = str(event.item), self._program.copied[str(event.item)]
        held, target = tuple(self._values[name] for name in names), chunk_ops.EVENT_TARGETS[event.kind]
        if event.kind == EVICT:
            self.left[storage] = _node(self._graph, target, event.item, *held)
        elif event.kind != WAIT:
            self._copies[storage] = _node(self._graph, target, event.item, event.link, event.nbytes, *held)
        elif self._program.phase == FORWARD:
            _node(self._graph, target, event.item, event.link)
        else:
            self._back(_node(self._graph, target, event.item, event.link, self._copies[storage]), names)

    def _back(self, node: fx.Node, names: Sequence[str]) -> None:
        """Take the values of a storage from the node that yields them."""
        for index, name in enumerate(names):
            self._values[name] = _node(self._graph, operator.getitem, node, index)


def _events(
    graph: fx.Graph,
    stop: Sequence[Event],
    at: int = 0,
    complete: Mapping[tuple[int, int], int] = MappingProxyType({}),
    saved: _Saved | None = None,
) -> None:
    for position, event in enumerate(stop):
        if isinstance(event.item, SavedStorage):
            assert saved is not None, "an update has no saved values"
            saved.insert(event)
            continue
        _node(graph, chunk_ops.EVENT_TARGETS[event.kind], event.item, *((event.link,) if event.link else ()))
        if (at, position) in complete:
            _node(graph, chunk_ops.settle, complete[at, position])
