"""Dynamo: its compilations, marks, options and exceptions, and its frames on Python's stack."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx, nn
from torch._dynamo import compiled_autograd, config, convert_frame, eval_frame, trace_rules
from torch._dynamo.comptime import ComptimeContext, comptime
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule, remove_from_cache
from torch._dynamo.exc import (
    BackendCompilerFailed,
    RestartAnalysis,
    ShortenTraceback,
    SkipFrame,
    TensorifyScalarRestartAnalysis,
    TorchDynamoException,
    exceptions_allowed_to_be_fallback,
)

__all__ = [
    "ACTED_ON_BY_DYNAMO",
    "CONVERTS_FRAMES",
    "EVALUATES_FRAMES",
    "BackendCompilerFailed",
    "ComptimeContext",
    "OptimizedModule",
    "TensorifyScalarRestartAnalysis",
    "TorchDynamoException",
    "compile_lock",
    "comptime",
    "remove_from_cache",
]

CONVERTS_FRAMES = convert_frame.__file__
"""File of the code that compiles a frame. A backend's own frames are called from there."""

EVALUATES_FRAMES = eval_frame.__file__
"""File of the callables that `torch.compile` returns."""

ACTED_ON_BY_DYNAMO: tuple[type[Exception], ...] = (
    RestartAnalysis,
    SkipFrame,
    ShortenTraceback,
    *exceptions_allowed_to_be_fallback,
)
"""Exceptions of a backend that Dynamo handles: it traces anew, breaks the graph, or skips the function."""

TRACES_REGIONS_ONCE = importlib.util.find_spec("torch._dynamo.variables.invoke_subgraph") is not None
"""Whether Dynamo traces a `torch.compiler.nested_compile_region` only at its first call, as PyTorch 2.13 does."""

LINEAR = torch._C._nn.linear
"""Target of the nodes for `nn.functional.linear` in Dynamo's graphs."""

SWITCHES = (
    torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
    torch._C._set_grad_enabled,
)
"""Targets of the nodes in Dynamo's graphs at which autocast or the recording of gradients begins or ends."""

_MARKS = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")


def is_of_a_module(placeholder: fx.Node) -> bool:
    """Whether an input of Dynamo's graph is a module's parameter or buffer."""
    return "_dynamo_static_input_type" in (placeholder.meta.get("tensor_dict") or {})


def patched(**options: Any) -> AbstractContextManager[Any]:
    """Set options of Dynamo inside the block."""
    return config.patch(**options)


def in_compiled_autograd() -> bool:
    """Whether compiled autograd is running a backward, or having one compiled, now."""
    return compiled_autograd.in_compiled_autograd_region


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` wrapped, or the module itself."""
    return model._orig_mod if isinstance(model, OptimizedModule) else model


def is_marked_dynamic(tensor: torch.Tensor) -> bool:
    """Whether `mark_dynamic` or `maybe_mark_dynamic` marked a dimension of the tensor."""
    return any(getattr(tensor, mark, None) for mark in _MARKS)


def mark_alike(tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Mark those dimensions of `tensor` as dynamic that are marked in `like`."""
    for dim in getattr(like, "_dynamo_dynamic_indices", ()):
        torch._dynamo.mark_dynamic(tensor, dim)
    for dim in getattr(like, "_dynamo_weak_dynamic_indices", ()):
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def traced_object(context: ComptimeContext, name: str) -> Any:
    """Return the object that a local variable holds while Dynamo traces its function, or None if tracing made it."""
    traced = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
    return getattr(traced, "value", None)


def source_name(node: fx.Node) -> str:
    """Return how the frame reaches an input of the graph, such as "L['self']._modules['up']"; "" if unknown.

    A source's `name` is a method or an attribute, by its class.
    """
    name = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
    return name() if callable(name) else name


@dataclass(frozen=True)
class RecompileLimit:
    """A function that has reached Dynamo's limit of recompilations.

    Attributes:
        code: of the function.
        option: name of the option that sets the limit.
        times: the option's value.
        reason: why the function would have been compiled again; None: unknown.
        local_values: its arguments, and the cells of its closure.
        global_values: globals of its module, by name.
        is_whole_graph: the user asked for one graph without breaks (`fullgraph=True`).
    """

    code: CodeType
    option: str
    times: int
    reason: str | None
    local_values: tuple[Any, ...]
    global_values: Mapping[str, Any]
    is_whole_graph: bool


def compiled_code() -> CodeType | None:
    """Return the code of the function that Dynamo compiles now; None if other code called the backend."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is convert_frame._compile.__code__:
            return frame.f_locals["code"]
        frame = frame.f_back
    return None


def is_all_of(gm: fx.GraphModule, code: CodeType) -> bool:
    """Whether Dynamo's graph, as a backend is given it, is all that a function with this code computes."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return compiled_code() is code and reason is not None and not reason.graph_break


def watch_compilations(
    backend: Callable[..., Any],
    begin: Callable[[dict[str, Any] | None, Collection[Any]], None],
    at_limit: Callable[[RecompileLimit], None],
) -> None:
    """Call `begin` before Dynamo traces a function for `backend`, and `at_limit` where its recompile limit is reached.

    No hook of Dynamo's for this survives nested compilations, so its function that checks the limit is wrapped.

    Args:
        begin: gets the options that the user gave with the backend, and the function's arguments. Also called once
            `at_limit` has returned, when nothing will be traced.
        at_limit: if it raises, so does the call of the function; otherwise the function runs uncompiled.
    """
    judge = convert_frame.exceeds_recompile_limit

    @functools.wraps(judge)
    def exceeds(*args: Any) -> tuple[bool, str]:
        exceeded, limit = judge(*args)
        asking = sys._getframe(1).f_locals
        compiler = _given_compiler(asking.get("compiler_fn"))
        if compiles_by(compiler, backend):
            if exceeded:
                at_limit(
                    RecompileLimit(
                        asking["code"],
                        limit,
                        getattr(config, limit),
                        asking.get("recompile_reason"),
                        (*asking["locals"].values(), *(asking["closure"] or ())),
                        asking["globals"],
                        asking["one_graph"],
                    )
                )
            begin(getattr(compiler, "kwargs", {}).get("options"), asking["locals"].values())
        return exceeded, limit

    convert_frame.exceeds_recompile_limit = exceeds  # type: ignore[assignment]


def watch_given(backend: Callable[..., Any], note: Callable[[Callable[..., Any]], None]) -> None:
    """Call `note` with each module, method or function that `torch.compile` gets for `backend`.

    Also let `module.compile()` compile modules of `torch.nn`'s own classes: Dynamo skips an outermost `forward` of
    these, and would compile nothing.

    There is no hook for either, so Dynamo's function that unwraps its argument is wrapped.
    """
    unwrap = eval_frame.innermost_fn

    @functools.wraps(unwrap)
    def unwrapped_and_noted(given: Callable[..., Any]) -> Callable[..., Any]:
        innermost = unwrap(given)
        context = sys._getframe(1).f_locals.get("self")
        if not isinstance(context, OptimizeContext) or not compiles_by(context.callback, backend):
            return innermost
        note(innermost)
        return _visible(innermost)

    eval_frame.innermost_fn = unwrapped_and_noted  # type: ignore[assignment]


def _visible(given: Any) -> Any:
    """Wrap the call of a module that `module.compile()` compiles in a function, if Dynamo would skip its `forward`.

    Dynamo keeps and counts compilations by code object. Modules of one structure share one, so that equal blocks are
    compiled once; other modules have their own, so that many of them do not count as one that is compiled too often.
    The qualified name is that of the module's `forward`, for errors.
    """
    if getattr(given, "__func__", None) is not nn.Module._call_impl:
        return given
    module = given.__self__
    if not trace_rules.check(type(module).forward):
        return given

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    structure = _structure(module)
    code = _CODE_BY_STRUCTURE.get(structure)
    if code is None:
        code = call.__code__.replace(co_qualname=type(module).forward.__qualname__)
        _CODE_BY_STRUCTURE[structure] = code
    call.__code__ = code
    return call


_CODE_BY_STRUCTURE: WeakValueDictionary[Hashable, CodeType] = WeakValueDictionary()
"""The code of `_visible`'s functions that are alive, by their modules' structure."""


def _structure(module: nn.Module) -> Hashable:
    """Describe what modules must share to be compiled once: classes, printed options and tensors' metadata."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    metadata = tuple((name, *_metadata(tensor)) for name, tensor in tensors)
    return type(module), repr(module), module.training, metadata


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad


def compiles_by(compiler: Any, backend: Callable[..., Any]) -> bool:
    """Whether a compiler is this backend, inside the wrappers of Dynamo and of `torch.compile`."""
    compiler = _given_compiler(compiler)
    return getattr(compiler, "compiler_fn", compiler) is backend


def _given_compiler(compiler: Any) -> Any:
    """Remove Dynamo's wrappers from a compiler; `torch.compile`'s own wrapper of a backend stays."""
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    return compiler
