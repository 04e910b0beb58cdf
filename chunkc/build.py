"""From captured graphs to compiled segments and programs: whole where everything fits, in segments otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc.graph import Captured, CompiledGraph, profile
from chunkc.ir.chunks import ChunkLayout
from chunkc.ir.program import PhaseProgram
from chunkc.options import Options
from chunkc.passes.codegen import CompiledSegment, compile_segment
from chunkc.passes.graphs import placeholders, returned
from chunkc.passes.planning import fixed_nbytes
from chunkc.passes.program import backward_program, forward_program
from chunkc.passes.segment_memory import eager_memory
from chunkc.passes.segments import Piece, SegmentTable, cut, extract, home_views
from chunkc.session import Session


@dataclass
class Capture:
    """What AOTAutograd hands over, piece by piece, and what was made of it."""

    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    num_user_outputs: int | None = None
    compiled: CompiledGraph | None = None


def order_of_use(graph: fx.Graph, by_placeholder: Mapping[str, str]) -> list[str]:
    """Parameter names in the order in which a graph reads them first; those it never reads come last."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source.name in by_placeholder and node.op != "output":
                found.setdefault(by_placeholder[source.name])
    return [*found, *(name for name in by_placeholder.values() if name not in found)]


@dataclass
class Builder:
    """Cuts, compiles and describes both phases: whole where everything fits, in segments otherwise."""

    session: Session
    capture: Capture
    options: Options
    by_placeholder: Mapping[str, str]
    gradients: Mapping[int, str]
    layout: ChunkLayout

    def build(self) -> Captured:
        if self.options.whole_graph == "auto" and (not self.layout.groups or self._can_be_resident()):
            estimate = self._captured(whole=True, compiled=False)
            if self._fits(estimate):
                whole = self._captured(whole=True, compiled=True)
                if self._fits(whole):
                    return whole
        return self._captured(whole=False, compiled=True)

    def _can_be_resident(self) -> bool:
        """Whether no group has been sent home already by another graph's plan."""
        everything = {group.index for group in self.session.store.layout.groups}
        return self.session.unplanned or self.session.store.resident == everything

    def _fits(self, captured: Captured) -> bool:
        """Whether all model data can stay on the compute tier."""
        resident = frozenset(group.index for group in self.layout.groups)
        fixed = fixed_nbytes(self.layout, resident)
        return all(
            fixed + position.non_model_nbytes <= self.session.budget_nbytes
            for position in profile(captured, self.layout).all
        )

    def _captured(self, *, whole: bool, compiled: bool) -> Captured:
        """With `compiled` false: only an upper bound of the memory, from the graph before any fusion."""
        capture, table = self.capture, SegmentTable()
        assert capture.forward is not None
        forward_pieces = self._pieces(capture.forward, {}, table, whole)
        backward_pieces: list[Piece] = []
        if capture.backward is not None:
            group_of = self.layout.group_of()
            nodes = returned(capture.backward.graph)
            wanted = {nodes[i]: group_of[p] for i, p in self.gradients.items() if p in group_of}
            backward_pieces = self._pieces(capture.backward, wanted, table, whole)
        segments = self._compile(table, [*forward_pieces, *backward_pieces], compiled)
        memories = {name: segment.memory for name, segment in segments.items()}
        num_outputs = len(returned(capture.forward.graph))
        forward = forward_program(
            capture.forward.graph,
            forward_pieces,
            memories,
            parameters=self.by_placeholder,
            num_user_outputs=num_outputs if capture.num_user_outputs is None else capture.num_user_outputs,
            hardware=self.session.hardware,
        )
        backward: PhaseProgram | None = None
        if capture.backward is not None:
            saved = {n.name for n in placeholders(capture.backward.graph)}
            backward = backward_program(
                capture.backward.graph,
                backward_pieces,
                memories,
                forward,
                parameters={name: p for name, p in self.by_placeholder.items() if name in saved},
                gradients=self.gradients,
                hardware=self.session.hardware,
            )
        modules = {segment.name: segment.module for segment in table.segments.values()}
        return Captured(forward, backward, segments, modules, whole)

    def _pieces(
        self, gm: fx.GraphModule, gradient_groups: Mapping[Any, int], table: SegmentTable, whole: bool
    ) -> list[Piece]:
        group_of = self.layout.group_of()
        nodes = {n: self.by_placeholder[n.name] for n in placeholders(gm.graph) if n.name in self.by_placeholder}
        groups = {node: group_of[name] for node, name in nodes.items() if name in group_of}
        views = home_views(gm.graph, list(groups))
        runs = cut(gm.graph, groups=groups, gradient_groups=gradient_groups, whole=whole)
        pieces = extract(gm, runs, table)
        return [*pieces, *extract(gm, [views], table, reads_home=True)] if views else pieces

    def _compile(self, table: SegmentTable, pieces: Sequence[Piece], compiled: bool) -> dict[str, CompiledSegment]:
        threads = torch.get_num_threads()
        at_home = {piece.segment.name for piece in pieces if piece.reads_home}
        found = {}
        for segment in table.segments.values():
            if compiled:
                codegen = "eager" if segment.name in at_home else self.options.codegen
                found[segment.name] = compile_segment(segment, codegen, threads)
            else:
                memory = eager_memory(segment.module.graph, threads)
                found[segment.name] = CompiledSegment(_not_compiled, memory)
        return found


def _not_compiled(inputs: list[Any]) -> Sequence[Any]:
    raise AssertionError("an estimate does not run")
