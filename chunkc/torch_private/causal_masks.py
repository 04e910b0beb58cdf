"""Answer, while Dynamo traces, whether the mask of `nn.Transformer` is causal.

That check needs the values of the mask, so Dynamo would break the graph inside of `torch.nn`, and it never compiles
functions there by themselves: all of an encoder would run uncompiled. Here the answer is computed on the mask's values
when the graph is traced. A causal mask may be left out of the computation, so the graph then asserts that the masks of
later calls are causal. Any other mask is applied, and so is one that happens to be causal in a later call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor
from torch._dynamo import convert_frame
from torch.nn.modules import transformer

_NO_LONGER = (
    "the attention mask was causal when the model was compiled, and is not now: it would be left out. Say which it is: "
    "is_causal=True or False of nn.TransformerEncoder, tgt_is_causal of nn.TransformerDecoder"
)


def install(is_compiled_by_chunkc: Callable[[object], bool]) -> None:
    """Substitute the check where Dynamo traces for a compiler of which `is_compiled_by_chunkc` says so."""

    @torch.compiler.assume_constant_result
    def is_chunkc() -> bool:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is convert_frame._compile.__code__:
                return is_compiled_by_chunkc(frame.f_locals["compiler_fn"])
            frame = frame.f_back
        return False

    @torch.compiler.assume_constant_result
    def answer(mask: Tensor) -> bool:
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
        if not is_chunkc():
            return bool(is_alike)
        if not answer(mask):
            return False
        torch._assert_async(is_alike, _NO_LONGER)
        return True
