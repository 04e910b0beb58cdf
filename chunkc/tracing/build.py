"""Make compiled segments and programs of captured graphs.

A graph is compiled whole if all its model data fits into the budget; otherwise it is cut into segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.estimates import how_to_avoid, not_known
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import ChunkLayout
from chunkc.ir.program import PhaseProgram
from chunkc.passes.codegen import (
    CompiledSegment,
    compiled_together,
    describe_segment,
    generated_wrapper,
)
from chunkc.passes.graphs.graphs import placeholders, returned
from chunkc.passes.graphs.shapes import AS_TRACED, Shapes
from chunkc.passes.memory.program import backward_program, forward_program
from chunkc.passes.segments.cuts import cut, home_views
from chunkc.passes.segments.segments import Piece, Segment, SegmentTable, extract, recompute_pieces
from chunkc.policy.captured_step import Captured
from chunkc.policy.decide import fits_whole
from chunkc.torch_private.engine import without_autocast
from chunkc.tracing import passes
from chunkc.tracing.capture import TracedGraphs
from chunkc.tracing.passes import CutContext
from chunkc.utils.progress import Show


@dataclass(frozen=True)
class Structure:
    """A step that was cut, as far as it does not depend on sizes.

    Attributes:
        graphs: of the phases that were cut, forward first.
        read_as: as in `PhaseProgram`.
        again: the piece that a backward repeats of a piece of the forward, by that one's index.
        compiled: the segments by name, each as it was last described.
    """

    graphs: tuple[fx.GraphModule, ...]
    read_as: Mapping[str, str]
    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    table: SegmentTable
    again: Mapping[int, Piece]
    compiled: dict[str, CompiledSegment] = field(default_factory=dict)


@dataclass
class Builder:
    """Cuts, compiles and describes both phases of a step.

    There are two structures of a step, whole and in segments; each is cut and compiled once, however often it is
    described.

    Attributes:
        can_skip_segmentation: whether the graph may be compiled whole if all its model data fits.
        compiled: False describes only: the same bytes, but no compiler is started and nothing can run.
        strict: refuse operators with inner memory that is a guess.
        graph_fraction: as in `Captured`.
        show: called with the work that begins.
    """

    capture: TracedGraphs
    codegen: str
    layout: ChunkLayout
    budget_nbytes: int
    hardware: Hardware
    can_skip_segmentation: bool
    compiled: bool = True
    strict: bool = False
    graph_fraction: float = 1.0
    show: Show = lambda what, done, of: None
    _structures: dict[bool, Structure] = field(default_factory=dict)

    def build(self, described: Callable[[bool, bool], Captured] | None = None) -> Captured:
        """Build the step: whole if that fits into the budget, else in segments.

        Args:
            described: makes the step from `whole` and `estimated`; by default `described`, with the traced sizes.
        """
        described = described or self.described
        if self.can_skip_segmentation and fits_whole(self.layout, self.budget_nbytes):
            estimate = described(True, True)
            if fits_whole(self.layout, self.budget_nbytes, estimate):
                whole = estimate if self.estimate_is_exact else described(True, False)
                if fits_whole(self.layout, self.budget_nbytes, whole):
                    return whole
        return described(False, False)

    @property
    def estimate_is_exact(self) -> bool:
        """Whether an estimate equals the description: nothing is fused, and nothing is to be compiled."""
        return not self.compiled and self.codegen == "eager"

    @property
    def _repeats_operators(self) -> bool:
        """Whether a backward may repeat single operators of the forward: they run one by one."""
        return self.codegen == "eager" and self.capture.may_repeat and self.capture.backward is not None

    def _structure(self, whole: bool) -> Structure:
        if whole not in self._structures:
            table = SegmentTable()
            graphs, read_as = self._graphs(whole)
            forward, backward = self._pieces(graphs[0], {}, table, whole), []
            if len(graphs) > 1:
                group_of = self.layout.group_of()
                nodes = returned(graphs[1].graph)
                wanted = {nodes[i]: group_of[p] for i, p in self.capture.gradients.items() if p in group_of}
                backward = self._pieces(graphs[1], wanted, table, whole)
            again: Mapping[int, Piece] = {}
            if self._repeats_operators and not whole:
                num_outputs = self.capture.num_user_outputs
                saved = [node for node in returned(graphs[0].graph)[num_outputs:] if node is not None]
                again = recompute_pieces(graphs[0], forward, saved, table)
            self._structures[whole] = Structure(graphs, read_as, tuple(forward), tuple(backward), table, again)
        return self._structures[whole]

    def _graphs(self, whole: bool) -> tuple[tuple[fx.GraphModule, ...], Mapping[str, str]]:
        """Return the phases to cut, and the kind of cast as which they read a parameter, by name.

        A whole graph reads no parameter as a cast: all its parameters are resident.
        """
        if whole:
            return self.capture.graphs(), {}
        context = CutContext(
            self.capture.by_placeholder,
            self.capture.num_user_outputs,
            self.layout,
            self._repeats_operators,
            self.capture.may_repeat,
            self.capture.new_buffers,
        )
        return passes.run(passes.CUT, self.capture.graphs(), context), context.read_as

    def described(self, whole: bool, estimated: bool = False, shapes: Shapes = AS_TRACED) -> Captured:
        """Describe the step: its programs, segments and bytes.

        Args:
            whole: not cut.
            estimated: give only an upper bound of the memory, from the graph before any fusion, which is quick.
            shapes: makes sizes of the traced ones.

        Raises:
            UnsupportedError: an operator's inner memory is a guess, and `strict` refuses that.
        """
        # The captured graph has autocast's casts already; a second time they would change what compilers trace.
        with without_autocast(), torch.no_grad():
            return self._described(whole, estimated, shapes)

    def _described(self, whole: bool, estimated: bool, shapes: Shapes) -> Captured:
        capture, structure = self.capture, self._structure(whole)
        graph, *backward_graphs = (gm.graph for gm in structure.graphs)
        segments = self._segments(structure, estimated, shapes)
        memories = {name: segment.memory for name, segment in segments.items()}
        num_outputs = len(returned(graph))
        forward = forward_program(
            graph,
            structure.forward,
            memories,
            parameters=self.capture.by_placeholder,
            num_user_outputs=num_outputs if capture.num_user_outputs is None else capture.num_user_outputs,
            hardware=self.hardware,
            new_buffers=capture.new_buffers,
            read_as=structure.read_as,
            again=structure.again,
            shapes=shapes,
        )
        backward: PhaseProgram | None = None
        for graph in backward_graphs:
            saved = {n.name for n in placeholders(graph)}
            backward = backward_program(
                graph,
                structure.backward,
                memories,
                forward,
                parameters={name: p for name, p in self.capture.by_placeholder.items() if name in saved},
                gradients=self.capture.gradients,
                specs=self.layout.specs(),
                hardware=self.hardware,
                shapes=shapes,
            )
        modules = {segment.name: segment.module for segment in structure.table.segments.values()}
        captured = Captured(forward, backward, segments, modules, whole, graph_fraction=self.graph_fraction)
        unknown = captured.unknown_operators if self.strict and (not estimated or self.estimate_is_exact) else ()
        if unknown:
            raise UnsupportedError(
                f"{not_known(unknown[0])}, which strict=True refuses; {how_to_avoid(unknown[0])}, or use another "
                "formulation"
            )
        return captured

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
        views, unchunked = home_views(gm.graph, list(nodes)), [node for node in nodes if node not in groups]
        apart = self._repeats_operators and not gradient_groups and not whole
        runs = cut(
            gm.graph, groups=groups, gradient_groups=gradient_groups, unchunked=unchunked, whole=whole, apart=apart
        )
        pieces = extract(gm, runs, table)
        return [*pieces, *extract(gm, [views], table, reads_home=True)] if views else pieces

    def _segments(self, structure: Structure, estimated: bool, shapes: Shapes) -> dict[str, CompiledSegment]:
        segments = structure.table.segments.values()
        threads = torch.get_num_threads()
        if estimated:
            memories = {s.name: describe_segment(s, "eager", threads, shapes) for s in segments}
            return {name: CompiledSegment(_not_compiled, memory) for name, memory in memories.items()}
        at_home = {piece.segment.name for piece in (*structure.forward, *structure.backward) if piece.reads_home}
        codegens = {s.name: "eager" if s.name in at_home else self.codegen for s in segments}
        with compiled_together(self.show) as compile_segment:
            found = {}
            for done, s in enumerate(segments):
                self.show("compiling segments", done, len(segments))
                known = structure.compiled.get(s.name)
                if known is None and self.compiled:
                    found[s.name] = compile_segment(s, codegens[s.name], threads, shapes)
                else:
                    found[s.name] = self._described_again(known, s, codegens[s.name], shapes)
        structure.compiled.update(found)
        return found

    def _described_again(
        self, known: CompiledSegment | None, segment: Segment, codegen: str, shapes: Shapes
    ) -> CompiledSegment:
        wrapper = generated_wrapper(segment, codegen) if known is None else known.wrapper
        threads = torch.get_num_threads()
        memory = describe_segment(segment, codegen, threads, shapes, wrapper)
        return CompiledSegment(_not_compiled if known is None else known.run, memory, wrapper)


def _not_compiled(inputs: list[Any]) -> Sequence[Any]:
    raise AssertionError("a description does not run")
