"""`torch.compile(model, backend="chunkc")`: what Dynamo calls, with the way that a graph goes.

Dynamo's graph goes through AOTAutograd to a joint graph, is partitioned, laid into chunks, cut into segments, compiled
and measured by simulation. If the budget is large enough, the step is planned and verified; only then do parameters
move.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from chunkc import recompile_limit
from chunkc.compile import NotForAnyShapes, compile_graph
from chunkc.distributed.agreement import refuse
from chunkc.distributed.whole_parameters import compiled_whole, has_own_meshes
from chunkc.explaining.whole_step import completed
from chunkc.ir.errors import ChunkcError, InternalError, OptionsError, UnsupportedError
from chunkc.options import Options, parse_options
from chunkc.passes.codegen import prepare_compiler
from chunkc.passes.graphs.graphs import placeholders
from chunkc.runtime.store.shards import LocalShard, local_shard_of
from chunkc.session.logs import logger
from chunkc.session.update_graphs import is_between_calls
from chunkc.torch_private import causal_masks
from chunkc.torch_private.dynamo import (
    TensorifyScalarRestartAnalysis,
    compile_lock,
    compiled_code,
    compiles_by,
    in_compiled_autograd,
    watch_compilations,
    watch_given,
)
from chunkc.torch_private.fake import DataDependentOutputException, TracingContext, detect_fake_mode, tracing
from chunkc.tracing.autograd_checks import COMPILED_AUTOGRAD
from chunkc.tracing.caller import runs_inside_the_compiled_call
from chunkc.tracing.capture import detached
from chunkc.tracing.given_modules import GIVEN
from chunkc.tracing.internal_errors import as_internal_errors
from chunkc.tracing.names import GraphNames
from chunkc.tracing.shared_trace import MAX_TRACES, Traces
from chunkc.variants import Variant, Variants


def chunkc(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's, which calls this. See `chunkc.options.Options` for the options.

    Errors of chunkc's own are raised by the compiled callable, so that they reach the user as they are and not
    wrapped by Dynamo. Dynamo keeps the callable for every call that its guards let pass, so an error is that of the
    call for which the graph was compiled, and the next call is judged for itself.
    """
    with COMPILING:  # where Dynamo does not hold it
        try:
            with as_internal_errors():
                return _compiled(gm, example_inputs, options, mode)
        except InternalError as error:
            return _refusing(error, example_inputs)


COMPILING = compile_lock
"""Held while a graph is compiled, by Dynamo too. For other parameters of a known graph that happens outside of Dynamo,
and the tracer replaces `nn.Module.__call__` meanwhile, for all threads: guards must not be built then."""


def _compiled(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: dict[str, Any] | None, mode: str | None
) -> Callable[..., Any]:
    takes_parameters = any(isinstance(value, nn.Parameter) for value in (*example_inputs, *gm.parameters()))
    recompile_limit.note_graph(compiled_code(), is_helper=not takes_parameters and not _is_before_a_break(gm))
    try:
        if mode is not None:
            raise OptionsError(f'mode={mode!r} is for the backend "inductor"; chunkc takes options={{...}}')
        settings = parse_options(options, os.environ)
    except OptionsError as error:
        return _refusing(error, example_inputs)
    if in_compiled_autograd():
        return _refusing(UnsupportedError(COMPILED_AUTOGRAD), example_inputs)
    if is_between_calls(gm, example_inputs):
        logger.info("a graph that updates parameters or gradients runs operator by operator, outside of any plan")
        return gm.forward
    is_part = _is_part(gm)
    try:
        return compiled_whole(gm, example_inputs, partial(_served, settings=settings, options=options, is_part=is_part))
    except UnsupportedError as error:
        return _refusing(error, example_inputs)


def _served(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    settings: Options,
    options: dict[str, Any] | None,
    is_part: bool,
) -> Callable[..., Any]:
    names = GraphNames(gm)
    traces = Traces(MAX_TRACES)

    def compile_for(inputs: Sequence[Any], arguments: Sequence[Any] | None = None) -> Callable[..., Any]:
        with as_internal_errors(NotForAnyShapes):  # a later call compiles outside of Dynamo
            return compile_graph(gm, traces, inputs, names, settings, options, arguments, is_part=is_part)

    variants = Variants(compile_for, COMPILING, partial(completed, options=settings))
    try:
        if not _is_symbolic(gm, example_inputs):
            variants.compile(example_inputs)
        elif has_own_meshes(gm):
            _refuse_symbols_of_numbers(gm)
            logger.warning(_BY_SHAPE, "PyTorch traces no DTensors with symbols as sizes")
        else:
            compile_later = partial(_compile_in_symbols, variants, gm, compile_for)
            _compile_for_any_shapes(variants, compile_later, example_inputs)
    except ChunkcError as error:
        variants.error_of_next = _without_frames(error)
    return variants


def _is_part(gm: fx.GraphModule) -> bool:
    """Whether Dynamo runs other code of the model besides this graph: after a break, or around all of it."""
    return _is_before_a_break(gm) or runs_inside_the_compiled_call()


def _is_before_a_break(gm: fx.GraphModule) -> bool:
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and reason.graph_break


def _without_frames(error: ChunkcError) -> ChunkcError:
    """Drop the frames that an error passed, which would keep their values alive; return the error."""
    error.__traceback__ = error.__context__ = None
    if error.__cause__ is not None:
        error.__cause__.__traceback__ = error.__cause__.__context__ = None
    return error


def _refusing(error: ChunkcError, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Refuse as `_raising` does, and tell other ranks, which wait for this one to compile the graph."""
    parts = (part for value in inputs if isinstance(part := local_shard_of(value), LocalShard))
    if (first := next(parts, None)) is not None:
        refuse(first.transport, error)
        if first.is_tensor_parallel:
            refuse(first.world, error)
    return _raising(error)


def _raising(error: ChunkcError) -> Callable[..., Any]:
    """Return a function that raises a copy of the error at each call.

    A new copy each time: Dynamo keeps the function for as long as the model's code, and an error keeps its frames.
    """
    cause = _without_frames(error).__cause__

    def call(*args: Any) -> Any:
        raise copy.copy(error) from cause

    return call


def _is_symbolic(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a size, or a number of Python's such as a module's attribute, is a symbol of Dynamo's."""
    values = [*example_inputs, *(node.meta.get("example_value") for node in gm.graph.nodes)]
    return any(isinstance(value, (torch.SymInt, torch.SymFloat)) for value in values)


def _refuse_symbols_of_numbers(gm: fx.GraphModule) -> None:
    if any(isinstance(node.meta.get("example_value"), torch.SymFloat) for node in gm.graph.nodes):
        raise UnsupportedError(
            "dynamic=True of torch.compile makes symbols of the model's numbers, with which PyTorch traces no "
            "DTensors: leave it out; where shapes change, each is compiled for itself"
        )


_BY_SHAPE = "this graph's shapes change, and each will be compiled for itself: %s"


def _compile_for_any_shapes(
    variants: Variants, compile_later: Callable[[Sequence[Any]], Variant], inputs: Sequence[Any]
) -> None:
    """Compile once for all shapes that Dynamo's graph serves; where that cannot be, each as it comes."""
    try:
        variants.for_any_shapes = compile_later
        variants.compile(inputs, any_shapes=True)
    except NotForAnyShapes as error:
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
        # for as long as something holds it.
        met = [mode.from_tensor(value, static_shapes=True) for value in inputs if isinstance(value, nn.Parameter)]
        with tracing(TracingContext(mode)), _no_more_guards(mode.shape_env):
            call = compile_for(inputs, arguments)
        del met
        return variants.add(call, inputs, any_shapes=True)
    except NotForAnyShapes as error:
        variants.for_any_shapes = None
        logger.warning(_BY_SHAPE, error.__cause__)
        return variants.compile(arguments)
    except (DataDependentOutputException, TensorifyScalarRestartAnalysis) as error:
        # AOTAutograd, inside of Dynamo, would have made Dynamo begin again
        raise UnsupportedError(
            "the first call failed before it was known which of the model's numbers are constants; call "
            "torch._dynamo.reset(), and the model again"
        ) from error


@contextmanager
def _no_more_guards(env: ShapeEnv) -> Iterator[None]:
    """Inside, tracing and compilation take nothing more for granted of sizes: Dynamo, which guards them, is gone.

    Raises:
        NotForAnyShapes: they did.
    """

    def taken() -> tuple[int, int]:
        return len(env.guards), env.counter["ignored_backward_guard"]

    before = taken()
    yield
    if taken() != before:
        cause = UnsupportedError("compiled for other parameters, the graph is valid for fewer sizes")
        raise NotForAnyShapes from cause


def _as_traced(value: Any, argument: Any) -> Any:
    """Return a parameter as it is, and in place of any other tensor its traced one, which has symbols for sizes.

    `capture_graph` has detached the traced ones, so they are told again whether they require gradients.
    """
    if isinstance(argument, nn.Parameter):
        return argument
    return detached(value).requires_grad_(argument.requires_grad) if isinstance(value, torch.Tensor) else value


def _begin(options: dict[str, Any] | None, arguments: Collection[Any]) -> None:
    """Note the modules that a function gets, and start the C++ compiler while Dynamo traces.

    Wrong options are refused where the graph is compiled.
    """
    for value in pytree.tree_leaves(list(arguments)):
        if isinstance(value, nn.Module):
            GIVEN.note(value)
    with suppress(OptionsError):
        if parse_options(options, os.environ).codegen == "inductor":
            prepare_compiler()


watch_compilations(chunkc, _begin, recompile_limit.at_limit)
watch_given(chunkc, GIVEN.note)
causal_masks.install(partial(compiles_by, backend=chunkc))
