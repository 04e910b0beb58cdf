"""From captured graphs to compiled segments and programs: whole where everything fits, in segments otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc.capture import Capture
from chunkc.captured import Captured, profile
from chunkc.ir.chunks import ChunkLayout
from chunkc.ir.hardware import Hardware
from chunkc.ir.program import PhaseProgram
from chunkc.passes.codegen import CompiledSegment, compile_segment, describe_segment
from chunkc.passes.graphs import placeholders, returned
from chunkc.passes.planning import fixed_nbytes
from chunkc.passes.program import backward_program, forward_program
from chunkc.passes.segments import Piece, SegmentTable, cut, extract, home_views


@dataclass
class Builder:
    """Cuts, compiles and describes both phases: whole where everything fits, in segments otherwise.

    Attributes:
        may_be_whole: whether the graph may be compiled whole if all its model data fits.
        compiled: false for a description alone: the same bytes, but no compiler is started and nothing can run.
    """

    capture: Capture
    codegen: str
    layout: ChunkLayout
    budget_nbytes: int
    hardware: Hardware
    may_be_whole: bool
    compiled: bool = True

    def build(self) -> Captured:
        if self.may_be_whole and self._staying_nbytes <= self.budget_nbytes:
            estimate = self._captured(whole=True, estimated=True)
            if self._fits(estimate):
                exact = not self.compiled and self.codegen == "eager"
                whole = estimate if exact else self._captured(whole=True)
                if self._fits(whole):
                    return whole
        return self._captured(whole=False)

    def _fits(self, captured: Captured) -> bool:
        """Whether all model data can stay on the compute tier."""
        fixed = self._staying_nbytes
        return all(
            fixed + position.non_model_nbytes <= self.budget_nbytes for position in profile(captured, self.layout).all
        )

    @property
    def _staying_nbytes(self) -> int:
        """All model data, on the compute tier."""
        return fixed_nbytes(self.layout, frozenset(group.index for group in self.layout.groups))

    def _captured(self, *, whole: bool, estimated: bool = False) -> Captured:
        """With `estimated`: only an upper bound of the memory, from the graph before any fusion, which is quick."""
        capture, table = self.capture, SegmentTable()
        assert capture.forward is not None
        forward_pieces = self._pieces(capture.forward, {}, table, whole)
        backward_pieces: list[Piece] = []
        if capture.backward is not None:
            group_of = self.layout.group_of()
            nodes = returned(capture.backward.graph)
            wanted = {nodes[i]: group_of[p] for i, p in self.capture.gradients.items() if p in group_of}
            backward_pieces = self._pieces(capture.backward, wanted, table, whole)
        segments = self._compile(table, [*forward_pieces, *backward_pieces], estimated)
        memories = {name: segment.memory for name, segment in segments.items()}
        num_outputs = len(returned(capture.forward.graph))
        forward = forward_program(
            capture.forward.graph,
            forward_pieces,
            memories,
            parameters=self.capture.by_placeholder,
            num_user_outputs=num_outputs if capture.num_user_outputs is None else capture.num_user_outputs,
            hardware=self.hardware,
            num_new_buffers=capture.num_new_buffers,
        )
        backward: PhaseProgram | None = None
        if capture.backward is not None:
            saved = {n.name for n in placeholders(capture.backward.graph)}
            backward = backward_program(
                capture.backward.graph,
                backward_pieces,
                memories,
                forward,
                parameters={name: p for name, p in self.capture.by_placeholder.items() if name in saved},
                gradients=self.capture.gradients,
                specs=self.layout.specs(),
                hardware=self.hardware,
            )
        modules = {segment.name: segment.module for segment in table.segments.values()}
        return Captured(forward, backward, segments, modules, whole)

    def _pieces(
        self, gm: fx.GraphModule, gradient_groups: Mapping[Any, int], table: SegmentTable, whole: bool
    ) -> list[Piece]:
        group_of = self.layout.group_of()
        nodes = {
            n: self.capture.by_placeholder[n.name]
            for n in placeholders(gm.graph)
            if n.name in self.capture.by_placeholder
        }
        groups = {node: group_of[name] for node, name in nodes.items() if name in group_of}
        views = home_views(gm.graph, list(groups))
        runs = cut(gm.graph, groups=groups, gradient_groups=gradient_groups, whole=whole)
        pieces = extract(gm, runs, table)
        return [*pieces, *extract(gm, [views], table, reads_home=True)] if views else pieces

    def _compile(self, table: SegmentTable, pieces: Sequence[Piece], estimated: bool) -> dict[str, CompiledSegment]:
        threads = torch.get_num_threads()
        at_home = {piece.segment.name for piece in pieces if piece.reads_home}
        found = {}
        for segment in table.segments.values():
            codegen = "eager" if estimated or segment.name in at_home else self.codegen
            if self.compiled and not estimated:
                found[segment.name] = compile_segment(segment, codegen, threads)
            else:
                found[segment.name] = CompiledSegment(_not_compiled, describe_segment(segment, codegen, threads))
        return found


def _not_compiled(inputs: list[Any]) -> Sequence[Any]:
    raise AssertionError("a description does not run")
