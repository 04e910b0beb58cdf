"""`torch.compile(model, backend="chunkc")`: the one room that sees all the others.

Dynamo's graph goes through AOTAutograd to a joint graph, is partitioned, cut into segments, compiled, measured on
paper, laid into chunks, planned and verified; only then do parameters move home.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._decomp import get_decompositions
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.decomposition import select_decomp_table
from torch._guards import detect_fake_mode
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V

from chunkc.graph import Captured, CompiledGraph, boxed, profile
from chunkc.ir.chunks import ChunkLayout
from chunkc.ir.errors import ChunkcError, OptionsError, UnsupportedError
from chunkc.ir.program import PhaseProgram
from chunkc.options import Options, parse_options
from chunkc.passes.codegen import CompiledSegment, compile_segment
from chunkc.passes.graphs import attribute_path, placeholders, returned
from chunkc.passes.partition import partition
from chunkc.passes.planning import check_minimum, choose_resident, fixed_nbytes
from chunkc.passes.program import backward_program, forward_program
from chunkc.passes.segment_memory import eager_memory
from chunkc.passes.segments import (
    RUN_BY_ATEN,
    Piece,
    SegmentTable,
    clone_parameter_views,
    cut,
    extract,
    home_views,
    materialise_returned_placeholders,
)
from chunkc.session import Session, can_move, owner, session_for, spec_of


def chunkc(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend, as Dynamo calls it. See `chunkc.options.Options` for the options.

    Errors of chunkc's own are raised by the compiled callable, so that they reach the user as they are and not
    wrapped by Dynamo.
    """
    try:
        if mode is not None:
            raise OptionsError(f'mode={mode!r} is for the backend "inductor"; chunkc takes options={{...}}')
        settings = parse_options(options)
        variants = _Variants(gm, _input_names(gm), settings, options)
        if not any(isinstance(value, torch.SymInt) for value in _example_values(gm, example_inputs)):
            variants.compile(example_inputs)
        return variants
    except ChunkcError as error:
        return _raising(error)


def _raising(error: ChunkcError) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise error.with_traceback(None)

    return call


class _Variants:
    """A graph compiled once per set of concrete shapes and of parameters.

    Dynamo gives one graph to all modules that look alike (blocks in a loop with a graph break), and symbolic shapes to
    a graph whose input shapes change; plans are for given parameters and given shapes.
    """

    def __init__(
        self, gm: fx.GraphModule, names: Sequence[str], settings: Options, source: Mapping[str, Any] | None
    ) -> None:
        self._gm, self._names, self._settings, self._source = gm, names, settings, source
        self._variants: list[_Variant] = []

    def compile(self, inputs: Sequence[Any]) -> _Variant:
        call = compile_graph(self._gm, inputs, self._names, self._settings, self._source)
        variant = _Variant(tuple(_identity(value) for value in inputs), call)
        self._variants.insert(0, variant)
        return variant

    def __call__(self, *args: Any) -> Any:
        for variant in self._variants:
            if variant.serves(args):
                return variant.call(*args)
        return self.compile(args).call(*args)


@dataclass(frozen=True)
class _Variant:
    identities: tuple[Any, ...]
    call: Callable[..., Any]

    def serves(self, args: Sequence[Any]) -> bool:
        for identity, value in zip(self.identities, args, strict=True):
            if isinstance(identity, weakref.ref):
                if identity() is not value:
                    return False
            elif identity != _identity(value):
                return False
        return True


def _identity(value: object) -> Any:
    """What must be equal for a compiled variant to serve: the very parameter, a tensor's layout, a number."""
    if isinstance(value, nn.Parameter):
        return weakref.ref(value)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return value


def _example_values(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    return [*example_inputs, *(node.meta.get("example_value") for node in placeholders(gm.graph))]


def _input_names(gm: fx.GraphModule) -> list[str]:
    """The user's name of every input: a parameter's attribute path, an argument's own name."""
    names = []
    for node in placeholders(gm.graph):
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", "")
        names.append(attribute_path(name() if callable(name) else name) or node.name)
    return names


@dataclass
class _Capture:
    """What AOTAutograd hands over, piece by piece."""

    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None
    num_user_outputs: int | None = None
    compiled: CompiledGraph | None = None
    problem: ChunkcError | None = field(default=None)


def compile_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    names: Sequence[str],
    options: Options,
    source: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    """Compile one graph for concrete shapes.

    Args:
        inputs: example inputs; parameters are the model's own `nn.Parameter`s.
        names: the user's name of each input.
        source: the options as the user gave them: their identity ties the graphs of one model together.

    Raises:
        BudgetError, UnsupportedError, HomeError, OptionsError: nothing was moved.
    """
    parameters = [value if isinstance(value, nn.Parameter) else None for value in inputs]
    session = session_for([p for p in parameters if p is not None], options, source)
    parameter_names = _name_parameters(session, parameters, names)
    capture = _Capture()

    def partition_fn(joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        capture.num_user_outputs = kwargs["num_fwd_outputs"]
        if options.codegen == "inductor":
            with V.set_fake_mode(detect_fake_mode(joint_inputs)):
                joint_graph_passes(joint)
        is_parameter = [p is not None for p in parameters]
        forward, capture.backward = partition(joint, joint_inputs, is_parameter=is_parameter, **kwargs)
        return forward, capture.backward

    def forward_compiler(graph: fx.GraphModule, _: Any) -> Any:
        capture.forward = graph
        return boxed(lambda arguments: _compiled(capture).forward(arguments))

    # AOTAutograd may ask for the backward at its first run only; it was planned with the forward all the same.
    def backward_compiler(graph: fx.GraphModule, _: Any) -> Any:
        return boxed(lambda arguments: _compiled(capture).backward(arguments))

    call = aot_module_simplified(
        gm,
        inputs,
        fw_compiler=forward_compiler,
        bw_compiler=backward_compiler,
        inference_compiler=forward_compiler,
        partition_fn=partition_fn,
        decompositions=_decompositions(options.codegen),
    )
    capture.compiled = _build(session, capture, options, parameters, parameter_names)
    return call


def _decompositions(codegen: str) -> Mapping[Any, Callable[..., Any]]:
    """What AOTAutograd takes apart: for Inductor its own table, but for the operators that run as they are
    (`segments.RUN_BY_ATEN`); for eager, next to nothing."""
    if codegen == "eager":
        return get_decompositions(_KEEP_MORE_THAN_THEY_SHOW)
    return {op: decompose for op, decompose in select_decomp_table().items() if op not in RUN_BY_ATEN}


_KEEP_MORE_THAN_THEY_SHOW = [
    torch.ops.aten.mse_loss,
    torch.ops.aten.smooth_l1_loss,
    torch.ops.aten.huber_loss,
    torch.ops.aten.binary_cross_entropy,
    torch.ops.aten.soft_margin_loss,
]
"""Losses whose scalar result lives in storage of the unreduced size on a CPU: bytes that no shape tells of."""


def _compiled(capture: _Capture) -> CompiledGraph:
    assert capture.compiled is not None, "the graph runs before it is compiled"
    return capture.compiled


def _name_parameters(
    session: Session, parameters: Sequence[nn.Parameter | None], names: Sequence[str]
) -> list[str | None]:
    """A name per input that is a parameter: the one its session knows it by, else the user's, made unique."""
    taken = set(session.store.parameters())
    found: list[str | None] = []
    for parameter, name in zip(parameters, names, strict=True):
        if parameter is None:
            found.append(None)
            continue
        if parameter.device.type != "cpu":
            raise UnsupportedError(f"{name} is on {parameter.device}; this version computes on the CPU only")
        hit = owner(parameter)
        if hit is None:
            unique, number = name, 2
            while unique in taken:
                unique, number = f"{name}#{number}", number + 1
            taken.add(unique)
            found.append(unique)
        else:
            found.append(hit[1])
    return found


def _build(
    session: Session,
    capture: _Capture,
    options: Options,
    parameters: Sequence[nn.Parameter | None],
    names: Sequence[str | None],
) -> CompiledGraph:
    forward, backward = capture.forward, capture.backward
    assert forward is not None
    primals = placeholders(forward.graph)
    if len(primals) != len(parameters):
        raise UnsupportedError("the model changes inputs that share memory; pass copies of them")
    by_placeholder = {node.name: name for node, name in zip(primals, names) if name is not None}
    named = {name: p for name, p in zip(names, parameters) if name is not None and p is not None}
    gradients: dict[int, str] = {}
    clone_parameter_views(forward.graph, [n for n in primals if n.name in by_placeholder])
    if backward is not None:
        results = returned(backward.graph)
        gradients = {i: name for i, name in enumerate(names) if name is not None and results[i] is not None}
        materialise_returned_placeholders(backward.graph, list(gradients))
        clone_parameter_views(
            backward.graph, [n for n in placeholders(backward.graph) if n.name in by_placeholder]
        )
    in_order = _order_of_use(forward.graph, by_placeholder)
    movable = [spec_of(name, named[name]) for name in in_order if can_move(named[name])]
    fixed = [spec_of(name, named[name]) for name in in_order if not can_move(named[name])]
    layout = session.extend_layout(movable, fixed)
    builder = _Builder(session, capture, options, by_placeholder, gradients, layout)
    captured = builder.build()
    step = profile(captured, layout)
    new = frozenset(g.index for g in layout.groups[len(session.store.layout.groups) :])
    allowed = frozenset(g.index for g in layout.groups) if session.unplanned else session.store.resident | new
    check_minimum(step.all, layout, session.budget_nbytes, 0)
    resident = choose_resident(step, layout, session.budget_nbytes, allowed)
    session.store.place(layout, named, resident)
    session.own(named)
    session.unplanned = False
    compiled = CompiledGraph(session, captured)
    compiled.plan(0)
    return compiled


def _order_of_use(graph: fx.Graph, by_placeholder: Mapping[str, str]) -> list[str]:
    found: dict[str, None] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            if source.name in by_placeholder and node.op != "output":
                found.setdefault(by_placeholder[source.name])
    return [*found, *(name for name in by_placeholder.values() if name not in found)]


@dataclass
class _Builder:
    """Cuts, compiles and describes both phases: whole where everything fits, in segments otherwise."""

    session: Session
    capture: _Capture
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

    def _compile(
        self, table: SegmentTable, pieces: Sequence[Piece], compiled: bool
    ) -> dict[str, CompiledSegment]:
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
