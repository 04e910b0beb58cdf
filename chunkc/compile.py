"""Compile one graph for Dynamo, stage by stage over one context (`STAGES`).

Only the last stage moves parameters: a compilation that fails leaves them as they were.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from chunkc.policy.remedies import explained
from chunkc.policy.state import GraphCaptured, StepDecision
from chunkc.program_text import num_numbers, text_of
from chunkc.runtime.store.shards import local_shard_of
from chunkc.session.changes import detect_changes, end_where_laid_out_otherwise, note_shared_memory
from chunkc.session.compiled_step import CompiledGraph, PlannedStep, planned_step
from chunkc.session.declared_states import stages_of_updates
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
from chunkc.tracing.shared_trace import MAX_TRACES, Bindings, SharedTrace, Traces, trace_key
from chunkc.tracing.steps import INPUTS, SizedStep, StaticSteps, Steps, SymbolicSteps
from chunkc.utils.garbage import no_automatic_collection
from chunkc.utils.progress import Show, compilation_progress

logger = logging.getLogger(__name__)


class NotForAnyShapes(Exception):
    """A graph cannot be compiled once for all shapes; the cause says why."""


@dataclass
class CompileContext:
    """The state of one graph on its way through `STAGES`.

    Attributes:
        traces, inputs, options, arguments: as of `compile_graph`.
        parameters: the inputs that are parameters, aligned with them; of a distributed one, this rank's shard.
        names: the user's names of the inputs.
        compare: compares facts with other ranks (see `agreement.rendezvous`).
        show: told what is done now.
        call: for Dynamo to call; runs the one graph that the last stage puts into `graphs`.
        is_traced: AOTAutograd traced the graph for this compilation; False: the trace is shared.
        named: the graph's parameters by their names in the session.
        layout: of all parameters, the graph's among them.
        steps, step: the graph at any sizes, and at those that it is planned for.
        moved_layout: the decided layout with the groups that all ranks replicate.
        code: as ranks compare it; None: one process trains the model.
    """

    session: Session
    gm: fx.GraphModule
    traces: Traces
    inputs: Sequence[Any]
    parameters: Sequence[nn.Parameter | None]
    names: Sequence[str]
    options: Options
    arguments: Sequence[Any] | None
    compare: Callable[[Callable[[], Facts]], None] = field(init=False)
    show: Show = field(init=False)
    graphs: list[CompiledGraph] = field(default_factory=list)
    call: Callable[..., Any] = field(init=False)
    capture: TracedGraphs = field(init=False)
    is_traced: bool = field(init=False)
    named: Mapping[str, nn.Parameter] = field(init=False)
    layout: ChunkLayout = field(init=False)
    steps: Steps = field(init=False)
    step: SizedStep = field(init=False)
    decision: StepDecision = field(init=False)
    planned: PlannedStep = field(init=False)
    moved_layout: ChunkLayout = field(init=False)
    code: Code | None = None


@no_automatic_collection()
def compile_graph(
    gm: fx.GraphModule,
    traces: Traces,
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
        traces: of the graph so far; a new one is added.
        inputs: example inputs, concrete or symbolic; parameters are the model's own `nn.Parameter`s.
        graph_names: of the graph's inputs and modules.
        source: the options as the user gave them: their identity ties the graphs of one model together.
        arguments: a call with sizes that symbolic shapes must fit; None: the sizes that were traced.
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
            one,
            Traces(MAX_TRACES),
            [inputs[p] for p in positions],
            GraphNames(one),
            options,
            source,
            given,
            is_part=is_part,
        )
        return _taking(positions, call)
    names = graph_names.take(inputs, UserNames.of_caller())
    parameters = [local_shard_of(value) if isinstance(value, nn.Parameter) else None for value in inputs]
    device = _compute_device(parameters, inputs, names, gm)
    owned = [p for p in parameters if p is not None]
    end_where_laid_out_otherwise(owned)
    transport = transport_of({n: p for n, p in zip(names, parameters, strict=True) if p is not None})
    options = options if transport is None else options.over_ranks
    session = session_for(owned, options, source, device)
    join(session, transport, options)
    session.known.more_graphs_may_follow |= is_part
    session.modules.update(list(called_modules())[-1:])
    context = CompileContext(session, gm, traces, inputs, parameters, names, options, arguments)
    with (
        rendezvous(transport, (NotForAnyShapes, TensorifyScalarRestartAnalysis)) as context.compare,
        session.entered(),
        _configured(session, options, source),
        compilation_progress() as context.show,
    ):
        for stage in STAGES:
            begin_s = time.perf_counter()
            stage(context)
            logger.info("stage %s: %.1f ms", stage.__name__, 1e3 * (time.perf_counter() - begin_s))
    (graph,), call = context.graphs, context.call
    is_symbolic = isinstance(graph.steps, SymbolicSteps)
    del context  # what Dynamo keeps must not keep example inputs

    def run(*args: Any) -> Any:
        if is_symbolic:
            graph.admit(args)
        outputs = call(*args)
        graph.output_hooks.watch(args, outputs)
        return outputs

    run.is_over = lambda: session.is_over  # type: ignore[attr-defined]
    return run


def _taking(positions: Sequence[int], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` with some of the arguments."""

    def taking(*args: Any) -> Any:
        return call(*(args[position] for position in positions))

    taking.is_over = call.is_over  # type: ignore[attr-defined]
    return taking


@contextmanager
def _configured(session: Session, options: Options, source: Mapping[str, Any] | None) -> Iterator[None]:
    """Give the session these options, and the former ones back if the compilation inside fails."""
    former = session.terms
    session.configure(options, DEFAULTS if source is None else source)
    try:
        yield
    except BaseException:
        session.agree(former)
        raise


def trace(context: CompileContext) -> None:
    """Trace the graph through AOTAutograd, on parameters as they are now."""
    session, parameters = context.session, context.parameters
    present = [parameter for parameter in parameters if parameter is not None]
    await_readers(present)  # while they read, parameters share their memory
    detect_changes(session, [owned[1] for parameter in present if (owned := owner(parameter)) is not None])
    parameter_names = _name_parameters(session, parameters, context.names)
    trained = [parameter for parameter in present if parameter.requires_grad]
    key = trace_key(context.inputs, parameter_names) if session.transport is None else None
    shared = None if key is None else context.traces.find(key)
    context.is_traced = shared is None or not shared.bindings.can_add(trained)
    if shared is None or context.is_traced:
        context.show("tracing", 0, None)
        bindings = Bindings()
        call, capture = capture_graph(
            context.gm,
            as_traced(context.inputs),
            parameter_names,
            codegen=context.options.codegen,
            loss_tile_rows=context.options.loss_tile_rows,
            repeatable=context.options.may_repeat,
            run_forward=bindings.run_forward,
            run_backward=bindings.run_backward,
        )
        shared = SharedTrace(bindings, call, capture, parameter_names)
        if key is not None:
            context.traces.keep(key, shared)
    context.capture = shared.named(parameter_names)
    context.call = shared.bindings.add(trained, context.graphs, shared.call)
    context.named = {
        name: p for name, p in zip(parameter_names, parameters, strict=True) if name is not None and p is not None
    }
    log_capture(context.capture, session.note_losses(context.capture.losses))


def lay_out(context: CompileContext) -> None:
    """Give each new parameter a place in a chunk, in the order of its first use, or none if it cannot move."""
    session, named, in_order = context.session, context.named, context.capture.order_of_use()
    note_shared_memory({name: named[name] for name in in_order if owner(named[name]) is None})
    refuse_residents(named)
    movable = [session.spec_of(name, named[name]) for name in in_order if can_move(named[name])]
    fixed = [session.spec_of(name, named[name]) for name in in_order if not can_move(named[name])]
    session.unfreeze({spec.name for spec in (*movable, *fixed) if spec.trainable})
    context.layout = session.extend_layout(movable, fixed)


def cut_and_compile(context: CompileContext) -> None:
    """Cut both phases into segments, compile these, and describe their memory (see `Builder`).

    One stage, as the cut depends on it: a graph is compiled whole if what it is described to need fits the budget.
    """
    session, options, capture = context.session, context.options, context.capture
    # Inductor's assumptions about symbolic sizes must reach Dynamo now: later, nothing more may be compiled.
    fused_for_any_sizes = options.codegen == "inductor" and bool(input_symbols(capture))
    builder = Builder(
        capture,
        options.codegen,
        context.layout,
        session.budget_nbytes,
        session.hardware,
        can_skip_segmentation=options.can_skip_segmentation and not fused_for_any_sizes,
        strict=options.strict,
        graph_fraction=graph_fraction(list(called_modules())[-1:], context.inputs) if options.may_leave else 1.0,
        show=context.show,
    )
    can_skip_segmentation = session.planner_state.can_skip_segmentation
    context.steps, context.step = _steps(builder, context.gm, can_skip_segmentation, context.arguments)
    captured = context.step.captured
    log_build(captured, context.layout)
    session.live.watch_constants(value for value in captured.constants if value.device.type == session.device.type)
    warn_of_estimates(session.note_estimates(captured.unknown_operators))


def choose(context: CompileContext) -> None:
    """Decide which groups are resident, and which saved activations are offloaded or recomputed.

    Raises:
        BudgetError: no decision fits; the error names the smallest budget of all graphs so far.
    """
    session, captured, layout = context.session, context.step.captured, context.layout
    context.show("planning", 0, None)
    try:
        parameters = {**session.store.views.parameters(), **context.named}
        session.num_stages = stages_of_updates(parameters.values())
        expected = session.in_backward.expected(layout, parameters)
        context.decision = decide(session.planner_state, GraphCaptured(captured, layout, expected))
    except BudgetError as error:
        called_with = context.inputs if context.arguments is None else context.arguments
        external = _external_bytes_now(session, captured, called_with)
        before = session.planner_state
        form = leanest_form(captured, before.activations, layout)
        needs = needs_of_step(form, before.trained, layout, external)
        num_graphs, trained = before.num_graphs + 1, before.trained | captured.trained
        with_graph = replace(before, layout=layout, num_graphs=num_graphs, trained=trained)
        named = session.known.named(error, with_graph, needs, begins=True)
        raise explained(named, form, with_graph, external) from None


def plan_and_verify(context: CompileContext) -> None:
    """Plan the step as decided, insert the plan into both phases, and verify the result."""
    context.planned = planned_step(context.session, context.step.captured, context.decision.request)


def compare_ranks(context: CompileContext) -> None:
    """Compare a first graph, or one with new parameters, with the other ranks', and agree on replicated groups.

    Later graphs are compared where their phases begin."""
    session, layout = context.session, context.decision.planner_state.layout
    context.moved_layout = layout
    if session.transport is None:
        return
    code = context.code = _code_of(context.capture)
    is_new = session.num_graphs == 0 or any(owner(parameter) is None for parameter in context.named.values())
    if is_new:
        context.compare(lambda: facts_of(code.program, layout, session))
    context.moved_layout = layout.with_replicated(whole_on_all(session, layout, is_new=is_new))
    context.step.history = f"compiled, {hashed(str(context.planned.plan))}"


def move(context: CompileContext) -> None:
    """Move parameters into their chunks; from now on the session has them, and the plan."""
    session, decided = context.session, context.decision.planner_state
    place(session, context.moved_layout, context.named, decided.resident)
    session.own(context.named)
    session.num_graphs, session.trained = decided.num_graphs, decided.trained
    if context.moved_layout.replicated_by_choice == decided.layout.replicated_by_choice:
        context.step.plans.keep(context.decision.request.key, context.planned)
    context.graphs.append(
        CompiledGraph(session, context.steps, context.step.captured, context.code, not context.is_traced)
    )


STAGES = (trace, lay_out, cut_and_compile, choose, plan_and_verify, compare_ranks, move)
"""From Dynamo's graph to one that runs. Each reads what those before it have set in the context."""


def _name_parameters(
    session: Session, parameters: Sequence[nn.Parameter | None], names: Sequence[str]
) -> list[str | None]:
    """Name each input that is a parameter: as its session does, else as the user does, made unique.

    A parameter that is gone leaves its name, and its place in a chunk, to one of the same layout.
    """
    taken, specs = set(session.store.views.parameters()), session.store.layout.specs()

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
    """Return the device of a graph's parameters, or of its tensors if it has none: a CUDA device if there is one.

    A graph without tensor inputs, such as the positions of a sequence, names the device in its arguments.
    """
    found = {name: p for name, p in zip(names, parameters, strict=True) if p is not None}
    if found:
        return device_of(found)
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    if not devices:
        arguments = pytree.tree_leaves([(node.args, node.kwargs) for node in gm.graph.nodes])
        devices = [parse_device(value) for value in arguments if isinstance(value, torch.device)]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


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
    """Return the facts that ranks of one model must have in common before parameters move."""
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


def _external_bytes_now(session: Session, captured: Captured, inputs: Sequence[Any]) -> ExternalBytes:
    """Return the external bytes of a graph that is compiled for `inputs`: none is known for symbolic ones."""
    tensors = [v for v in inputs if isinstance(v, torch.Tensor) and not isinstance(v, nn.Parameter)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return ExternalBytes(0, 0)
    return session.live.external_to_forward(captured, tensors)


def _steps(
    builder: Builder, gm: fx.GraphModule, can_skip_segmentation: bool, arguments: Sequence[Any] | None
) -> tuple[Steps, SizedStep]:
    """Return the graph at any sizes, and at those of a call's arguments, or as it was traced."""
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
