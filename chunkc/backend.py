"""`torch.compile(model, backend="chunkc")`: what Dynamo calls, with the way that a graph goes.

Dynamo's graph goes through AOTAutograd to a joint graph, is partitioned, cut into segments, compiled, measured on
paper, laid into chunks, planned and verified; only then do parameters move home.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from chunkc.backward_kinds import COMPILED_AUTOGRAD, in_compiled_autograd
from chunkc.build import Builder
from chunkc.caller import runs_inside_the_compiled_call
from chunkc.capture import Capture, capture_graph, unique_name
from chunkc.captured import Captured, residents_with
from chunkc.garbage import no_automatic_collection
from chunkc.graph import CompiledGraph
from chunkc.ir.errors import BudgetError, ChunkcError, OptionsError, UnsupportedError
from chunkc.known_needs import Held, needs_of_step
from chunkc.live_values import storages_nbytes
from chunkc.logs import log_build, log_capture, logger, warn_of_estimates
from chunkc.machines.devices import device_of
from chunkc.movable import can_move
from chunkc.moving import place
from chunkc.options import Options, parse_options
from chunkc.passes.codegen import prepare_compiler
from chunkc.passes.graphs import placeholders, without_tied_placeholders
from chunkc.progress import Show, compilation_progress
from chunkc.recompile_limit import watch
from chunkc.reconcile import end_where_laid_out_otherwise, note_shared_memory, reconcile
from chunkc.session import DEFAULTS, Session, owner, session_for
from chunkc.steps import INPUTS, SizedStep, StaticSteps, Steps, SymbolicSteps
from chunkc.templates import Templates, input_symbols
from chunkc.update_graphs import is_between_calls
from chunkc.user_names import GraphNames, UserNames
from chunkc.variants import Variant, Variants

watch()


def chunkc(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend, as Dynamo calls it. See `chunkc.options.Options` for the options.

    Errors of chunkc's own are raised by the compiled callable, so that they reach the user as they are and not
    wrapped by Dynamo. Dynamo keeps the callable for every call that its guards let pass, so an error is that of the
    call for which the graph was compiled, and the next call is judged for itself.
    """
    with COMPILING:
        return _compiled(gm, example_inputs, options, mode)


COMPILING = threading.RLock()
"""Held while a graph is compiled: for other parameters of a known graph that happens outside Dynamo's own lock."""


def _compiled(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any] | None, mode: str | None
) -> Callable[..., Any]:
    try:
        if mode is not None:
            raise OptionsError(f'mode={mode!r} is for the backend "inductor"; chunkc takes options={{...}}')
        settings = parse_options(options)
    except OptionsError as error:
        return _raising(error)
    if in_compiled_autograd():
        return _raising(UnsupportedError(COMPILED_AUTOGRAD))
    if is_between_calls(gm, example_inputs):
        logger.info("a graph that updates parameters or gradients runs operator by operator, outside of any plan")
        return gm.forward
    if settings.codegen == "inductor":
        prepare_compiler()
    names, is_part = GraphNames(gm), _is_part(gm)

    def compile_for(inputs: Sequence[Any], arguments: Sequence[Any] | None = None) -> Callable[..., Any]:
        return compile_graph(gm, inputs, names, settings, options, arguments, is_part=is_part)

    variants = Variants(compile_for, COMPILING)
    try:
        if _is_symbolic(gm, example_inputs):
            compile_later = partial(_compile_in_symbols, variants, gm, compile_for)
            _compile_for_any_shapes(variants, compile_later, example_inputs)
        else:
            variants.compile(example_inputs)
    except ChunkcError as error:
        variants.error_of_next = error
    return variants


def _is_part(gm: fx.GraphModule) -> bool:
    """Whether Dynamo runs other code of the model beside this graph: after a break, or around all of it."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return (reason is not None and reason.graph_break) or runs_inside_the_compiled_call()


def _raising(error: ChunkcError) -> Callable[..., Any]:
    """Raises the error at each call: a new one, as what is raised keeps the frames that it passes, with their values.

    Dynamo keeps what is returned here for as long as the model's code.
    """
    cause = error.__cause__
    error.__traceback__ = error.__context__ = error.__cause__ = None
    if cause is not None:
        cause.__traceback__ = cause.__context__ = None

    def call(*args: Any) -> Any:
        raise copy.copy(error) from cause

    return call


def _is_symbolic(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    values = [*example_inputs, *(node.meta.get("example_value") for node in placeholders(gm.graph))]
    return any(isinstance(value, torch.SymInt) for value in values)


_BY_SHAPE = "this graph's shapes change, and each will be compiled for itself: %s"


def _compile_for_any_shapes(
    variants: Variants, compile_later: Callable[[Sequence[Any]], Variant], inputs: Sequence[Any]
) -> None:
    """Compile once for all shapes that Dynamo's graph serves; where that cannot be, each as it comes."""
    try:
        variants.for_any_shapes = compile_later
        variants.compile(inputs, any_shapes=True)
    except _NotForAnyShapes as error:
        variants.for_any_shapes = None
        logger.warning(_BY_SHAPE, error.__cause__)


def _compile_in_symbols(
    variants: Variants, gm: fx.GraphModule, compile_for: Callable[..., Callable[..., Any]], arguments: Sequence[Any]
) -> Variant:
    """Compile for a later call: for its parameters and its sizes, with all else as Dynamo traced it, in symbols."""
    traced = [node.meta["example_value"] for node in placeholders(gm.graph)]
    mode = detect_fake_mode(traced)
    assert mode is not None
    assert mode.shape_env is not None
    with mode:
        inputs = [_as_traced(value, argument) for value, argument in zip(traced, arguments, strict=True)]
    try:
        # Dynamo, which says what is dynamic, has not seen these parameters. What the mode has met keeps its shape,
        # for as long as somebody holds it.
        met = [mode.from_tensor(value, static_shapes=True) for value in inputs if isinstance(value, nn.Parameter)]
        with tracing(TracingContext(mode)), _no_more_guards(mode.shape_env):
            call = compile_for(inputs, arguments)
        del met
        return variants.add(call, inputs, any_shapes=True)
    except _NotForAnyShapes as error:
        variants.for_any_shapes = None
        logger.warning(_BY_SHAPE, error.__cause__)
        return variants.compile(arguments)
    except DataDependentOutputException as error:  # AOTAutograd, inside of Dynamo, would have made Dynamo begin again
        raise UnsupportedError(
            "the first call failed before it was known which of the model's numbers are constants; call "
            "torch._dynamo.reset(), and the model again"
        ) from error


@contextmanager
def _no_more_guards(env: ShapeEnv) -> Iterator[None]:
    """Inside, tracing and compilation take nothing more for granted of sizes: Dynamo, which guards them, is gone.

    Raises:
        _NotForAnyShapes: they did.
    """

    def taken() -> tuple[int, int]:
        return len(env.guards), env.counter["ignored_backward_guard"]

    before = taken()
    yield
    if taken() != before:
        cause = UnsupportedError("compiled for other parameters, the graph is valid for fewer sizes")
        raise _NotForAnyShapes from cause


def _as_traced(value: Any, argument: Any) -> Any:
    """An argument in symbols. What was traced was detached since (`capture_graph`)."""
    if isinstance(argument, nn.Parameter):
        return argument
    return value.detach().requires_grad_(argument.requires_grad) if isinstance(value, torch.Tensor) else value


class _NotForAnyShapes(Exception):
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
    place(session, layout, named, resident)
    session.own(named)
    session.unplanned = False
    compiled = CompiledGraph(session, steps, captured)
    compiled.plan(SizedStep(captured), 0)
    return compiled


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
        raise _NotForAnyShapes from error
    if arguments is None:
        return steps, templates.at(templates.traced, may_be_whole=may_be_whole)
    return steps, steps.at(INPUTS, arguments, may_be_whole=may_be_whole).captured
