"""`torch.compile(model, backend="chunkc")`: the one room that sees all the others.

Dynamo's graph goes through AOTAutograd to a joint graph, is partitioned, cut into segments, compiled, measured on
paper, laid into chunks, planned and verified; only then do parameters move home.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._decomp import get_decompositions
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V

from chunkc.build import Builder, Capture, order_of_use
from chunkc.graph import CompiledGraph, boxed, profile
from chunkc.ir.errors import ChunkcError, OptionsError, UnsupportedError
from chunkc.options import Options, parse_options
from chunkc.passes.codegen import find_vector_isa
from chunkc.passes.graphs import attribute_path, placeholders, returned
from chunkc.passes.partition import partition
from chunkc.passes.planning import check_minimum, choose_resident
from chunkc.passes.segments import (
    RUN_BY_ATEN,
    clone_parameter_views,
    materialise_returned_placeholders,
)
from chunkc.session import Session, can_move, owner, session_for, spec_of
from chunkc.variants import Variants


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
        if settings.codegen == "inductor":
            find_vector_isa()
        names = _input_names(gm)
        variants = Variants(lambda inputs: compile_graph(gm, inputs, names, settings, options))
        if not any(isinstance(value, torch.SymInt) for value in _example_values(gm, example_inputs)):
            variants.compile(example_inputs)
        return variants
    except ChunkcError as error:
        return _raising(error)


def _raising(error: ChunkcError) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise error.with_traceback(None)

    return call


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
    capture = Capture()

    def partition_fn(joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        capture.num_user_outputs = kwargs["num_fwd_outputs"]
        if options.codegen == "inductor":
            with V.set_fake_mode(detect_fake_mode(joint_inputs)):
                joint_graph_passes(joint)
        is_parameter = [p is not None for p in parameters]
        forward, capture.backward = partition(joint, joint_inputs, is_parameter=is_parameter, **kwargs)
        return forward, capture.backward

    def forward_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        capture.forward = gm
        return boxed(lambda arguments: _compiled(capture).forward(arguments))

    # AOTAutograd may ask for the backward at its first run only; it was planned with the forward all the same.
    def backward_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
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


def _decompositions(codegen: str) -> dict[Any, Callable[..., Any]]:
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


def _compiled(capture: Capture) -> CompiledGraph:
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
    capture: Capture,
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
        clone_parameter_views(backward.graph, [n for n in placeholders(backward.graph) if n.name in by_placeholder])
    in_order = order_of_use(forward.graph, by_placeholder)
    movable = [spec_of(name, named[name]) for name in in_order if can_move(named[name])]
    fixed = [spec_of(name, named[name]) for name in in_order if not can_move(named[name])]
    layout = session.extend_layout(movable, fixed)
    builder = Builder(session, capture, options, by_placeholder, gradients, layout)
    captured = builder.build()
    step = profile(captured, layout)
    new = frozenset(g.index for g in layout.groups[len(session.store.layout.groups) :])
    everything = frozenset(g.index for g in layout.groups)
    allowed = everything if session.unplanned else session.store.resident | new
    minimum = check_minimum(step.all, layout, session.budget_nbytes, 0, all_may_stay=allowed == everything)
    session.minimum_nbytes = max(session.minimum_nbytes, minimum)
    resident = choose_resident(step, layout, session.budget_nbytes, allowed)
    session.store.place(layout, named, resident)
    session.own(named)
    session.unplanned = False
    compiled = CompiledGraph(session, captured)
    compiled.plan(0)
    return compiled
