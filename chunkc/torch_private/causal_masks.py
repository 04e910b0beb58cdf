"""Decide, while Dynamo traces, whether the mask of `nn.Transformer` is causal.

PyTorch's check reads the mask's values, so Dynamo would break the graph inside of `torch.nn`. It never compiles
functions there by themselves, so a whole encoder would run uncompiled. Here the mask is checked when the graph is
traced. A causal mask may be left out of the computation, so the graph asserts that the masks of later calls are causal.
Any other mask is applied, also if it happens to be causal in a later call.

An explanation traces on fake tensors. The mask is then computed from sizes, and from the real tensors that the fake
ones represent (`explained_with`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

import torch
from torch import Tensor, fx
from torch._dynamo import convert_frame
from torch._dynamo.variables import functions
from torch.nn.modules import transformer

from chunkc.torch_private.fake import FakeTensor, disable_current_modes

_NO_LONGER = (
    "the attention mask was causal when the model was compiled, and is not now: it would be left out. Say which it is: "
    "is_causal=True or False of nn.TransformerEncoder, tgt_is_causal of nn.TransformerDecoder"
)

_VALUES: ContextVar[Mapping[int, Tensor] | None] = ContextVar("values", default=None)


@contextmanager
def explained_with(values: Mapping[int, Tensor]) -> Iterator[None]:
    """Check masks inside the block for every backend, also on fake tensors.

    Args:
        values: `id` of a fake tensor -> the real tensor that it represents, where there is one.
    """
    token = _VALUES.set(values)
    try:
        yield
    finally:
        _VALUES.reset(token)


def install(is_compiled_by_chunkc: Callable[[object], bool]) -> None:
    """Replace PyTorch's check in graphs that Dynamo traces for chunkc.

    Args:
        is_compiled_by_chunkc: whether a compiler function, as Dynamo has it, is chunkc's.
    """

    @torch.compiler.assume_constant_result
    def is_chunkc() -> bool:
        if _VALUES.get() is not None:
            return True
        frame = _frame_above(convert_frame._compile)
        return frame is not None and is_compiled_by_chunkc(frame.f_locals["compiler_fn"])

    @torch.compiler.assume_constant_result
    def answer(mask: Tensor) -> bool | None:
        if isinstance(mask, FakeTensor):
            calling = _frame_above(functions.invoke_and_store_as_constant)
            assert calling is not None
            assert calling.f_back is not None
            node = calling.f_back.f_locals["args"][0].as_proxy().node
            with disable_current_modes():
                try:
                    mask = _evaluated(node, _VALUES.get() or {})
                except _UnknownError:
                    return None
                return is_causal_mask(mask)
        return is_causal_mask(mask)

    def is_causal_mask(mask: Tensor) -> bool:
        return bool((mask == causal(mask.size(-2), device=mask.device, dtype=mask.dtype)).all())

    causal = transformer._generate_square_subsequent_mask

    @torch.compiler.substitute_in_graph(transformer._detect_is_causal_mask)
    def _detect_is_causal_mask(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        if is_causal is not None or mask is None:
            return is_causal is True
        size = size if size is not None else mask.size(-2)
        if mask.size() != (size, size):
            return False
        is_alike = (mask == causal(size, device=mask.device, dtype=mask.dtype)).all()
        known = answer(mask) if is_chunkc() else None
        if known is None:
            return bool(is_alike)
        if not known:
            return False
        torch._assert_async(is_alike, _NO_LONGER)
        return True


def _frame_above(function: Callable[..., object]) -> FrameType | None:
    """Return the innermost frame of `function` on the stack; None if it is not running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame


class _UnknownError(Exception):
    """A value depends on tensors without known values."""


def _evaluated(node: fx.Node, values: Mapping[int, Tensor]) -> Tensor:
    """Compute the value of a node of Dynamo's graph.

    Raises:
        _UnknownError: it depends on an input that is not among `values`, or on a node that is neither input nor call.
    """
    if node.op == "placeholder" and "grapharg" in node.meta:
        example = node.meta["grapharg"].example
        if id(example) not in values:
            raise _UnknownError
        return values[id(example)].detach().cpu()
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: _evaluated(source, values))
    if node.op == "call_function":
        assert callable(node.target)
        return node.target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    raise _UnknownError
