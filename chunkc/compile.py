"""One graph from Dynamo to a callable: trace, lay out, cut, compile, choose residents, plan and verify; then parameters
move. A compilation that fails leaves them as they were."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from chunkc.distributed.agreement import Facts, hashed, rendezvous, transport_of
from chunkc.distributed.whole_parameters import as_traced
from chunkc.ir.errors import BudgetError, UnsupportedError
from chunkc.ir.layout import ChunkLayout
from chunkc.machines.devices import device_of, parse_device
from chunkc.options import Options
from chunkc.passes.graphs.collectives import without_group_names
from chunkc.passes.graphs.graphs import placeholders, without_tied_placeholders
from chunkc.policy.activation_search import leanest_form
from chunkc.policy.captured_step import Captured
from chunkc.policy.decide import decide
from chunkc.policy.graph_fraction import graph_fraction
from chunkc.policy.needs import ExternalBytes, needs_of_step
from chunkc.policy.state import GraphCaptured
from chunkc.program_text import num_numbers, text_of
from chunkc.runtime.store.shards import local_shard_of
from chunkc.session.changes import detect_changes, end_where_laid_out_otherwise, note_shared_memory
from chunkc.session.compiled_step import CompiledGraph, plan_key, planned_step
from chunkc.session.logs import log_build, log_capture, warn_of_estimates
from chunkc.session.lookup import join, session_for
from chunkc.session.movable import can_move, refuse_residents
from chunkc.session.pending_readers import await_readers
from chunkc.session.rank_phases import Code, whole_on_all
from chunkc.session.residency import place
from chunkc.session.session import DEFAULTS, Session, owner
from chunkc.torch_private.dynamo import TensorifyScalarRestartAnalysis
from chunkc.torch_private.fake import FakeTensor
from chunkc.tracing.build import Builder
from chunkc.tracing.caller import called_modules
from chunkc.tracing.capture import TracedGraphs, capture_graph, unique_name
from chunkc.tracing.dynamic_shapes import Templates, input_symbols
from chunkc.tracing.names import GraphNames, UserNames
from chunkc.tracing.steps import INPUTS, SizedStep, StaticSteps, Steps, SymbolicSteps
from chunkc.utils.garbage import no_automatic_collection
from chunkc.utils.progress import Show, compilation_progress


class NotForAnyShapes(Exception):
    """The cause says why a graph cannot be compiled once for all shapes."""


@no_automatic_collection()
def compile_graph(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    graph_names: GraphNames,
    options: Options,
    source: Mapping[str, Any] | None,
    arguments: Sequence[Any] | None = None,
    *,
    is_part: bool = False,
) -> Callable[..., Any]:
    """Compile one graph for given shapes, or for the symbolic ones that Dynamo is tracing now.

    Args:
        inputs: example inputs, concrete or symbolic; parameters are the model's own `nn.Parameter`s.
        graph_names: of the graph's inputs and modules.
        source: the options as the user gave them: their identity ties the graphs of one model together.
        arguments: the call at whose sizes symbolic shapes must fit; None: at those that were traced.
        is_part: torch.compile splits the model, and the graph is a part of it.

    Raises:
        BudgetError, UnsupportedError, HomeError, OptionsError: nothing was moved.
    """
    first: dict[int, int] = {}
    for position, value in enumerate(inputs):
        if isinstance(value, nn.Parameter):
            first.setdefault(id(value), position)
    tied = {at: first[id(v)] for at, v in enumerate(inputs) if isinstance(v, nn.Parameter) and first[id(v)] != at}
    if tied:  # since Dynamo saw two parameters, both modules were given one
        positions = [position for position in range(len(inputs)) if position not in tied]
        one = without_tied_placeholders(gm, tied)
        given = None if arguments is None else [arguments[p] for p in positions]
        call = compile_graph(
            one, [inputs[p] for p in positions], GraphNames(one), options, source, given, is_part=is_part
        )
        return _taking(positions, call)
    names = graph_names.take(inputs, UserNames.of_caller())
    parameters = [local_shard_of(value) if isinstance(value, nn.Parameter) else None for value in inputs]
    device = _compute_device(parameters, inputs, names, gm)
    owned = [p for p in parameters if p is not None]
    end_where_laid_out_otherwise(owned)
    transport = transport_of({n: p for n, p in zip(names, parameters, strict=True) if p is not None})
    session = session_for(owned, options, source, device)
    join(session, transport, options)
    session.known.more_graphs_may_follow |= is_part
    session.modules.update(list(called_modules())[-1:])
    with (
        rendezvous(transport, (NotForAnyShapes, TensorifyScalarRestartAnalysis)) as compare,
        session.entered(),
        _configured(session, options, source),
    ):
        graph, call = _compile_in(session, gm, inputs, parameters, names, options, arguments, compare)
    is_symbolic = isinstance(graph.steps, SymbolicSteps)

    def run(*args: Any) -> Any:
        if is_symbolic:
            graph.admit(args)
        outputs = call(*args)
        graph.output_hooks.watch(args, outputs)
        return outputs

    run.is_over = lambda: session.is_over  # type: ignore[attr-defined]
    return run


def _taking(positions: Sequence[int], call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` with some of the arguments."""

    def taking(*args: Any) -> Any:
        return call(*(args[position] for position in positions))

    taking.is_over = call.is_over  # type: ignore[attr-defined]
    return taking


@contextmanager
def _configured(session: Session, options: Options, source: Mapping[str, Any] | None) -> Iterator[None]:
    """The session has these options from now on, unless what is compiled inside fails."""
    former = session.terms
    session.configure(options, DEFAULTS if source is None else source)
    try:
        yield
    except BaseException:
        session.agree(former)
        raise


def _compile_in(
    session: Session,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    parameters: Sequence[nn.Parameter | None],
    names: Sequence[str],
    options: Options,
    arguments: Sequence[Any] | None,
    compare: Callable[[Callable[[], Facts]], None],
) -> tuple[CompiledGraph, Callable[..., Any]]:
    """As `compile_graph`: what Dynamo is to call, and the graph that it runs. `compare`: see `ranks.rendezvous`."""
    await_readers(p for p in parameters if p is not None)  # while they read, parameters are somebody else's, too
    detect_changes(session, [hit[1] for p in parameters if p is not None and (hit := owner(p)) is not None])
    parameter_names = _name_parameters(session, parameters, names)
    compiled: list[CompiledGraph] = []
    with compilation_progress() as show:
        show("tracing", 0, None)
        call, capture = capture_graph(
            gm,
            as_traced(inputs),
            parameter_names,
            codegen=options.codegen,
            loss_tile_rows=options.loss_tile_rows,
            repeatable=options.may_repeat,
            run_forward=lambda arguments: compiled[0].forward(arguments),
            run_backward=lambda arguments: compiled[0].backward(arguments),
        )
        named = {name: p for name, p in zip(parameter_names, parameters) if name is not None and p is not None}
        log_capture(capture)
        compiled.append(_build(session, capture, options, named, gm, show, inputs, arguments, compare))
    return compiled[0], call


def _name_parameters(
    session: Session, parameters: Sequence[nn.Parameter | None], names: Sequence[str]
) -> list[str | None]:
    """A name per input that is a parameter: the one its session knows it by, else the user's, made unique.

    A parameter that is gone leaves its name, and its place in a chunk, to one of the same layout.
    """
    taken, specs = set(session.store.parameters()), session.store.layout.specs()

    def is_free(parameter: nn.Parameter, name: str) -> bool:
        fits = name not in specs or (can_move(parameter) and specs[name] == session.spec_of(name, parameter))
        return name not in taken and fits

    found: list[str | None] = []
    for parameter, name in zip(parameters, names, strict=True):
        if parameter is None:
            found.append(None)
            continue
        if parameter.device != session.store.tier.device:
            raise UnsupportedError(
                f"{name} is on {parameter.device}, but other parameters that share its budget are on "
                f"{session.store.tier.device}; a model computes on one device"
            )
        hit = owner(parameter)
        if hit is None:
            unique = unique_name(name, partial(is_free, parameter))
            taken.add(unique)
            found.append(unique)
        else:
            found.append(hit[1])
    return found


def _compute_device(
    parameters: Sequence[nn.Parameter | None], inputs: Sequence[Any], names: Sequence[str], gm: fx.GraphModule
) -> torch.device:
    """The device of a graph's parameters, or of its tensors where it has none: a CUDA device if there is one. A graph
    that is given no tensors, such as the positions of a sequence, says where it makes them."""
    found = {name: p for name, p in zip(names, parameters, strict=True) if p is not None}
    if found:
        return device_of(found)
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    if not devices:
        arguments = pytree.tree_leaves([(node.args, node.kwargs) for node in gm.graph.nodes])
        devices = [parse_device(value) for value in arguments if isinstance(value, torch.device)]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _build(
    session: Session,
    capture: TracedGraphs,
    options: Options,
    named: Mapping[str, nn.Parameter],
    gm: fx.GraphModule,
    show: Show,
    inputs: Sequence[Any],
    arguments: Sequence[Any] | None,
    compare: Callable[[Callable[[], Facts]], None],
) -> CompiledGraph:
    in_order = capture.order_of_use()
    note_shared_memory({name: named[name] for name in in_order if owner(named[name]) is None})
    refuse_residents(named)
    movable = [session.spec_of(name, named[name]) for name in in_order if can_move(named[name])]
    fixed = [session.spec_of(name, named[name]) for name in in_order if not can_move(named[name])]
    session.unfreeze({spec.name for spec in (*movable, *fixed) if spec.trainable})
    layout = session.extend_layout(movable, fixed)
    # What Inductor takes for granted of symbolic sizes Dynamo must hear now: later, nothing more may be compiled.
    fused_for_any_sizes = options.codegen == "inductor" and bool(input_symbols(capture))
    builder = Builder(
        capture,
        options.codegen,
        layout,
        session.budget_nbytes,
        session.hardware,
        can_skip_segmentation=options.can_skip_segmentation and not fused_for_any_sizes,
        strict=options.strict,
        graph_fraction=graph_fraction(list(called_modules())[-1:], inputs) if options.may_leave else 1.0,
        show=show,
    )
    steps, step = _steps(builder, gm, session.planner_state.can_skip_segmentation, arguments)
    log_build(step.captured, layout)
    session.live.watch_constants(value for value in step.captured.constants if value.device.type == session.device.type)
    warn_of_estimates(session.note_estimates(step.captured.unknown_operators))
    show("planning", 0, None)
    try:
        context = session.in_backward.expected(layout, {**session.store.parameters(), **named})
        decision = decide(session.planner_state, GraphCaptured(step.captured, layout, context))
    except BudgetError as error:
        held = _held_now(session, step.captured, inputs if arguments is None else arguments)
        form = leanest_form(step.captured, options.activations, layout)
        needs = needs_of_step(form, session.trained, layout, held)
        num_graphs, trained = session.num_graphs + 1, session.trained | step.captured.trained
        raise session.known.named(error, layout, needs, num_graphs, trained, begins=True) from None
    planned = planned_step(session, step.captured, decision.request)  # verified before anything moves
    layout = decision.planner_state.layout
    code = None if session.transport is None else _code_of(capture)
    if code is not None:
        is_new = session.num_graphs == 0 or any(owner(parameter) is None for parameter in named.values())
        if is_new:
            program = code.program
            compare(lambda: facts_of(program, layout, session))  # later graphs are compared where their phases begin
        layout = layout.with_replicated(whole_on_all(session, layout, is_new=is_new))
    place(session, layout, named, decision.planner_state.resident)
    session.own(named)
    session.num_graphs, session.trained = decision.planner_state.num_graphs, decision.planner_state.trained
    if layout.replicated_by_choice == decision.planner_state.layout.replicated_by_choice:
        step.plans.keep(plan_key(session, decision.request.key), planned)
    if code is not None:
        step.history = f"compiled, {hashed(str(planned.plan))}"
    return CompiledGraph(session, steps, step.captured, code)


_GPU_NUMBER = re.compile(r"'cuda', index=[0-9]+")
"""In a graph's code: each rank has a GPU of its own."""


def _code_of(capture: TracedGraphs) -> Code:
    graphs = [
        without_group_names(_GPU_NUMBER.sub("'cuda'", graph.code))
        for graph in (capture.forward, capture.backward)
        if graph is not None
    ]
    kind = f"{bool(input_symbols(capture))} {num_numbers(capture)}"
    return Code(hashed(text_of(capture)), hashed("\n".join(graphs)), kind)


def facts_of(program: str, layout: ChunkLayout, session: Session) -> Facts:
    """What ranks that train one model have in common where their parameters move."""
    found = [(g, [(s.spec.name, s.spec.shards, s.slot_offset) for s in g.slices]) for g in layout.groups]
    in_common = [
        (group.index, [(name, shards and (shards.shape, shards.zero_stage), at) for name, shards, at in of])
        for group, of in found
    ]
    return {
        "the phase": "compilation",
        "the versions of PyTorch and chunkc": f"{torch.__version__} {version('chunkc')}",
        "the options": repr(session.options.in_common),
        "the budget in bytes": str(session.budget_nbytes),
        "the program of the model": program,
        "the layout of parameters": repr(in_common),
    }


def _held_now(session: Session, captured: Captured, inputs: Sequence[Any]) -> ExternalBytes:
    """What others hold now, beside a graph that is compiled for `inputs`; of symbolic ones it is not known."""
    tensors = [v for v in inputs if isinstance(v, torch.Tensor) and not isinstance(v, nn.Parameter)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return ExternalBytes(0, 0)
    return session.live.external_to_forward(captured, tensors)


def _steps(
    builder: Builder, gm: fx.GraphModule, can_skip_segmentation: bool, arguments: Sequence[Any] | None
) -> tuple[Steps, SizedStep]:
    """The graph at any sizes it serves, and at those of a call's arguments, or as it was traced."""
    if not input_symbols(builder.capture):
        captured = builder.build() if can_skip_segmentation else builder.described(whole=False)
        static = StaticSteps(captured, builder)
        return static, static.step
    try:
        inputs = [node.meta.get("example_value") for node in placeholders(gm.graph)]
        steps = SymbolicSteps(Templates(builder), builder.capture, inputs)
    except UnsupportedError as error:
        raise NotForAnyShapes from error
    if arguments is None:
        return steps, steps.as_traced(can_skip_segmentation=can_skip_segmentation)
    return steps, steps.at(INPUTS, arguments, can_skip_segmentation=can_skip_segmentation)
