"""One graph from Dynamo to a callable: trace, lay out, cut, compile, choose residents, plan and verify; then parameters
move. A compilation that fails leaves them as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from chunkc.build import Builder
from chunkc.capture import Capture, capture_graph, unique_name
from chunkc.captured import Captured, residents_with
from chunkc.garbage import no_automatic_collection
from chunkc.graph import CompiledGraph, planned_step
from chunkc.ir.errors import BudgetError, UnsupportedError
from chunkc.known_needs import Held, needs_of_step
from chunkc.live_values import storages_nbytes
from chunkc.logs import log_build, log_capture, warn_of_estimates
from chunkc.machines.devices import device_of
from chunkc.movable import can_move
from chunkc.moving import place
from chunkc.options import Options
from chunkc.passes.graphs import placeholders, without_tied_placeholders
from chunkc.progress import Show, compilation_progress
from chunkc.reconcile import end_where_laid_out_otherwise, note_shared_memory, reconcile
from chunkc.session import DEFAULTS, Session, owner, session_for
from chunkc.steps import INPUTS, StaticSteps, Steps, SymbolicSteps
from chunkc.templates import Templates, input_symbols
from chunkc.torch_private.fake import FakeTensor
from chunkc.user_names import GraphNames, UserNames


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
    parameters = [value if isinstance(value, nn.Parameter) else None for value in inputs]
    device = _compute_device(parameters, inputs, names)
    owned = [p for p in parameters if p is not None]
    end_where_laid_out_otherwise(owned)
    session = session_for(owned, options, source, device)
    session.known.has_parts |= is_part
    with session.entered(), _configured(session, options, source):
        graph, call = _compile_in(session, gm, inputs, parameters, names, options, arguments)
    is_symbolic = isinstance(graph.steps, SymbolicSteps)

    def run(*args: Any) -> Any:
        if is_symbolic:
            graph.admit(args)
        outputs = call(*args)
        graph.grad_modes.watch(args, outputs)
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
    former = session.options, session.options_source, session.budget_nbytes, session.store.debug
    session.configure(options, DEFAULTS if source is None else source)
    try:
        yield
    except BaseException:
        session.options, session.options_source, session.budget_nbytes, session.store.debug = former
        raise


def _compile_in(
    session: Session,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    parameters: Sequence[nn.Parameter | None],
    names: Sequence[str],
    options: Options,
    arguments: Sequence[Any] | None,
) -> tuple[CompiledGraph, Callable[..., Any]]:
    """As `compile_graph`: what Dynamo is to call, and the graph that it runs."""
    reconcile(session, [hit[1] for p in parameters if p is not None and (hit := owner(p)) is not None])
    parameter_names = _name_parameters(session, parameters, names)
    compiled: list[CompiledGraph] = []
    with compilation_progress() as show:
        show("tracing", 0, None)
        call, capture = capture_graph(
            gm,
            inputs,
            parameter_names,
            codegen=options.codegen,
            run_forward=lambda arguments: compiled[0].forward(arguments),
            run_backward=lambda arguments: compiled[0].backward(arguments),
        )
        named = {name: p for name, p in zip(parameter_names, parameters) if name is not None and p is not None}
        log_capture(capture)
        compiled.append(_build(session, capture, options, named, gm, show, inputs, arguments))
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
    parameters: Sequence[nn.Parameter | None], inputs: Sequence[Any], names: Sequence[str]
) -> torch.device:
    """The device of a graph's parameters, or of its tensors where it has none: a CUDA device if there is one."""
    found = {name: p for name, p in zip(names, parameters, strict=True) if p is not None}
    if found:
        return device_of(found)
    devices = [value.device for value in inputs if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type == "cuda"), torch.device("cpu"))


def _build(
    session: Session,
    capture: Capture,
    options: Options,
    named: Mapping[str, nn.Parameter],
    gm: fx.GraphModule,
    show: Show,
    inputs: Sequence[Any],
    arguments: Sequence[Any] | None,
) -> CompiledGraph:
    in_order = capture.order_of_use()
    note_shared_memory({name: named[name] for name in in_order if owner(named[name]) is None})
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
        may_be_whole=options.whole_graph == "auto" and not fused_for_any_sizes,
        strict=options.strict,
        show=show,
    )
    steps, captured = _steps(builder, gm, session.all_may_stay(), arguments)
    log_build(captured, layout)
    warn_of_estimates(session.note_estimates(captured.unknown_operators))
    show("planning", 0, None)
    num_known = 0 if session.unplanned else len(session.store.layout.groups)
    try:
        resident, _ = residents_with(captured, layout, session.budget_nbytes, session.store.resident, num_known)
    except BudgetError as error:
        needs = needs_of_step(
            captured, session.trained, layout, _held_now(session, captured, inputs if arguments is None else arguments)
        )
        raise session.known.named(error, layout, needs, session.num_graphs + 1) from None
    planned_step(session, layout, resident, captured)  # verified before anything moves
    place(session, layout, named, resident)
    session.own(named)
    session.unplanned = False
    return CompiledGraph(session, steps, captured)


def _held_now(session: Session, captured: Captured, inputs: Sequence[Any]) -> Held:
    """What others hold now, beside a graph that is compiled for `inputs`; of symbolic ones it is not known."""
    tensors = [v for v in inputs if isinstance(v, torch.Tensor) and not isinstance(v, nn.Parameter)]
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return Held(0, 0)
    return Held.around(captured, session.live.nbytes(leaving_out=tensors), storages_nbytes(tensors))


def _steps(
    builder: Builder, gm: fx.GraphModule, may_be_whole: bool, arguments: Sequence[Any] | None
) -> tuple[Steps, Captured]:
    """The graph at any sizes it serves, and at those of a call's arguments, or as it was traced."""
    if not input_symbols(builder.capture):
        captured = builder.build() if may_be_whole else builder.described(whole=False)
        return StaticSteps(captured, partial(builder.described, whole=False)), captured
    try:
        templates = Templates(builder)
        inputs = [node.meta.get("example_value") for node in placeholders(gm.graph)]
        steps = SymbolicSteps(templates, builder.capture, inputs)
    except UnsupportedError as error:
        raise NotForAnyShapes from error
    if arguments is None:
        return steps, templates.at(templates.traced, may_be_whole=may_be_whole)
    return steps, steps.at(INPUTS, arguments, may_be_whole=may_be_whole).captured
