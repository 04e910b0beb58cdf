"""`torch.compile(model, backend="chunkc")`: what Dynamo calls, with the way that a graph goes.

Dynamo's graph goes through AOTAutograd to a joint graph, is partitioned, cut into segments, compiled, measured on
paper, laid into chunks, planned and verified; only then do parameters move home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from chunkc.build import Builder
from chunkc.capture import Capture, capture_graph, input_names, unique_name
from chunkc.captured import Captured, residents_with
from chunkc.garbage import no_automatic_collection
from chunkc.graph import CompiledGraph
from chunkc.ir.errors import ChunkcError, OptionsError, UnsupportedError
from chunkc.logs import log_build, log_capture, logger
from chunkc.machines.devices import device_of
from chunkc.moving import place
from chunkc.options import Options, parse_options
from chunkc.passes.codegen import prepare_compiler
from chunkc.passes.graphs import placeholders
from chunkc.progress import Show, compilation_progress
from chunkc.session import Session, can_move, owner, session_for
from chunkc.steps import SizedStep, StaticSteps, Steps, SymbolicSteps
from chunkc.templates import Templates, input_symbols
from chunkc.variants import Variant, Variants


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
            prepare_compiler()
        names = input_names(gm)
        variants = Variants(lambda inputs: compile_graph(gm, inputs, names, settings, options))
        if _is_symbolic(gm, example_inputs):
            _compile_for_any_shapes(variants, gm, example_inputs)
        else:
            variants.compile(example_inputs)
        return variants
    except ChunkcError as error:
        return _raising(error)


def _raising(error: ChunkcError) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise error.with_traceback(None)

    return call


def _is_symbolic(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    values = [*example_inputs, *(node.meta.get("example_value") for node in placeholders(gm.graph))]
    return any(isinstance(value, torch.SymInt) for value in values)


_BY_SHAPE = "this graph's shapes change, and each will be compiled for itself: %s"


def _compile_for_any_shapes(variants: Variants, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Compile once for all shapes that Dynamo's graph serves; where that cannot be, each as it comes."""
    try:
        variants.compile(inputs, any_shapes=True)
        variants.for_any_shapes = partial(_compile_in_symbols, variants, gm)
    except _NotForAnyShapes as error:
        logger.warning(_BY_SHAPE, error.__cause__)


def _compile_in_symbols(variants: Variants, gm: fx.GraphModule, arguments: Sequence[Any]) -> Variant:
    """Compile for the parameters among a later call's arguments, with all else as Dynamo traced it, in symbols."""
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
            call = variants.compile_for(inputs)
        del met
        return variants.add(call, inputs, any_shapes=True)
    except _NotForAnyShapes as error:
        variants.for_any_shapes = None
        logger.warning(_BY_SHAPE, error.__cause__)
        return variants.compile(arguments)


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
    names: Sequence[str],
    options: Options,
    source: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    """Compile one graph for given shapes, or for the symbolic ones that Dynamo is tracing now.

    Args:
        inputs: example inputs, concrete or symbolic; parameters are the model's own `nn.Parameter`s.
        names: the user's name of each input.
        source: the options as the user gave them: their identity ties the graphs of one model together.

    Raises:
        BudgetError, UnsupportedError, HomeError, OptionsError: nothing was moved.
    """
    parameters = [value if isinstance(value, nn.Parameter) else None for value in inputs]
    device = _compute_device(parameters, inputs, names)
    session = session_for([p for p in parameters if p is not None], options, source, device)
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
        compiled.append(_build(session, capture, options, named, gm, show))
    if not isinstance(compiled[0].steps, SymbolicSteps):
        return call

    def admitted(*args: Any) -> Any:
        compiled[0].admit(args)
        return call(*args)

    return admitted


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
) -> CompiledGraph:
    in_order = capture.order_of_use()
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
        show=show,
    )
    steps, captured = _steps(builder, gm, session.all_may_stay())
    log_build(captured, layout)
    show("planning", 0, None)
    num_known = 0 if session.unplanned else len(session.store.layout.groups)
    resident, minimum = residents_with(captured, layout, session.budget_nbytes, session.store.resident, num_known)
    session.minimum_nbytes = max(session.minimum_nbytes, minimum)
    place(session, layout, named, resident)
    session.own(named)
    session.unplanned = False
    compiled = CompiledGraph(session, steps, captured)
    compiled.plan(SizedStep(captured), 0)
    return compiled


def _steps(builder: Builder, gm: fx.GraphModule, may_be_whole: bool) -> tuple[Steps, Captured]:
    """The graph at any sizes it serves, and as it was traced."""
    if not input_symbols(builder.capture):
        captured = builder.build() if may_be_whole else builder.described(whole=False)
        return StaticSteps(captured, partial(builder.described, whole=False)), captured
    try:
        templates = Templates(builder)
        inputs = [node.meta.get("example_value") for node in placeholders(gm.graph)]
        steps = SymbolicSteps(templates, builder.capture, inputs)
    except UnsupportedError as error:
        raise _NotForAnyShapes from error
    return steps, templates.at(templates.traced, may_be_whole=may_be_whole)
