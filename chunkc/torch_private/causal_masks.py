"""Answer, while Dynamo traces, whether the mask of `nn.Transformer` is causal.

That check needs the values of the mask, so Dynamo would break the graph inside of `torch.nn`, and it never compiles
functions there by themselves: all of an encoder would run uncompiled. Here the answer is computed on the mask's values
when the graph is traced. A causal mask may be left out of the computation, so the graph then asserts that the masks of
later calls are causal. Any other mask is applied, and so is one that happens to be causal in a later call.

An explanation traces on fake tensors. The values that a mask is made of are then those of the tensors for which the
fake ones stand (`explained_with`), and of sizes.
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
    """Answer for whatever compiles what Dynamo traces inside of the block, on fake tensors.

    Args:
        values: identity of a fake tensor -> the tensor for which it stands, where there is one.
    """
    token = _VALUES.set(values)
    try:
        yield
    finally:
        _VALUES.reset(token)


def install(is_compiled_by_chunkc: Callable[[object], bool]) -> None:
    """Substitute the check where Dynamo traces for a compiler of which `is_compiled_by_chunkc` says so."""

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
    """The innermost frame of `function` that is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame


class _UnknownError(Exception):
    """A value depends on tensors of which only the form is known."""


def _evaluated(node: fx.Node, values: Mapping[int, Tensor]) -> Tensor:
    """Compute the value of a node of Dynamo's graph.

    Raises:
        _UnknownError: it depends on what is not among `values`.
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
