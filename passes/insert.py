"""Program and plan into an FX graph with chunk nodes: what the verifier checks, the runtime lowers and people read."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import fx, nn

from chunkc.ir import chunk_ops
from chunkc.ir.chunks import GRAD, PARAM, ChunkLayout, chunk_name
from chunkc.ir.plan import Event, PhasePlan, Tile
from chunkc.ir.program import PhaseProgram


def insert_events(
    program: PhaseProgram,
    plan: PhasePlan,
    segments: Mapping[str, nn.Module],
    *,
    group_of: Mapping[str, int],
    resident: frozenset[int],
    layout: ChunkLayout | None = None,
) -> fx.GraphModule:
    """Build the rewritten graph of one phase; with a `layout`, saying when its groups are settled at home.

    Placeholders carry `meta["storage"] = (name, bytes, held)`, for the verifier. A gradient is owned by its sink when
    the program hands it over.
    """
    graph = fx.Graph()
    values: dict[str, fx.Node] = {}
    for value, storage in program.inputs.items():
        node = graph.placeholder(value)
        node.meta["storage"] = (storage, program.storages[storage], storage in program.held)
        node.meta["parameter"] = program.parameters.get(value)
        values[value] = node
    settled = {} if layout is None else settled_after(program, plan, layout)
    for at, (call, stop) in enumerate(zip(program.calls, plan.stops)):
        _events(graph, stop, at, settled)
        args = [values[value] for value in call.inputs]
        for position, name in call.parameters:
            group = group_of.get(name)
            if group is not None and group not in resident:
                args[position] = graph.call_function(chunk_ops.parameter, (chunk_name(PARAM, group), name))
        result = graph.call_module(call.segment, tuple(args))
        result.meta["call"] = call.name
        for index, value in enumerate(call.outputs):
            values[value] = graph.call_function(operator.getitem, (result, index))
        for value, name in call.gradients:
            group = group_of.get(name)
            chunk = None if group is None or group in resident else chunk_name(GRAD, group)
            graph.call_function(chunk_ops.sink, (name, chunk, values[value], value in program.handed_over))
    _events(graph, plan.stops[-1], len(plan.stops) - 1, settled)
    graph.output(tuple(None if value is None else values[value] for value in program.outputs))
    root = nn.Module()
    for call in program.calls:
        if not hasattr(root, call.segment):
            root.add_module(call.segment, segments[call.segment])
    return fx.GraphModule(root, graph, f"chunkc_{program.phase}")


def insert_update_events(plan: PhasePlan, tiles: Sequence[Tile]) -> fx.GraphModule:
    """The optimizer's step over `tiles`, one fused update each, with the events of `plan`."""
    graph = fx.Graph()
    for tile, stop in zip(tiles, plan.stops):
        _events(graph, stop)
        graph.call_function(chunk_ops.update, _arguments(tile))
    _events(graph, plan.stops[-1])
    graph.output(())
    return fx.GraphModule(nn.Module(), graph, "chunkc_update")


def _arguments(tile: Tile) -> tuple[int, ...]:
    elements = (tile.group, tile.begin, tile.end)
    return elements if tile.num_stages == 1 else (*elements, tile.stage, tile.num_stages)


def settled_after(program: PhaseProgram, plan: PhasePlan, layout: ChunkLayout) -> dict[tuple[int, int], int]:
    """Where groups are settled: after which event of which stop, which group.

    That is the last event that starts a copy of the group's parameters or gradients, either way. Only groups count
    all of whose gradients are sunk by this program.
    """
    sunk = {name for call in program.calls for _, name in call.gradients}
    return {
        where: index
        for index, where in plan.last_copies().items()
        if layout.groups[index].trainable and all(s.spec.name in sunk for s in layout.groups[index].slices)
    }


def _events(
    graph: fx.Graph, stop: Sequence[Event], at: int = 0, settled: Mapping[tuple[int, int], int] = MappingProxyType({})
) -> None:
    for position, event in enumerate(stop):
        graph.call_function(chunk_ops.EVENT_TARGETS[event.kind], (event.chunk,))
        if (at, position) in settled:
            graph.call_function(chunk_ops.settle, (settled[at, position],))
