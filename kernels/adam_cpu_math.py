"""What the CPU passes of Adam and AdamW compute: the reference's operations, in forms that Inductor vectorises.

Integers are 32 bits wide and wrap around, as the vector units' do; a right shift is followed by a mask, since it
copies the sign.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chunkc.kernels.formats import QUANT_BLOCK, AdamFormat, RoundingKey
from chunkc.kernels.fused_pass import Pass, compile_pass, host_tensor
from chunkc.kernels.hyper import AdamScalars
from chunkc.kernels.rounding import (
    EXP_AVG_SQ_STREAM,
    EXP_AVG_STREAM,
    HIGH_FACTOR,
    MIX_FACTORS,
    PARAM_STREAM,
    STREAM_FACTOR,
)

_STREAMS = (PARAM_STREAM, EXP_AVG_STREAM, EXP_AVG_SQ_STREAM)
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class AdamPass:
    """Which pass.

    Args:
        l2: Adam's weight decay joins the gradient.
        scaled: gradients are multiplied by two factors first.
        parallel: for as many threads as torch has at the call; otherwise for one.
    """

    fmt: AdamFormat
    l2: bool
    scaled: bool
    parallel: bool


@functools.cache
def adam_pass(key: AdamPass) -> Pass:
    """The compiled pass, over a list of tensors, which it empties:

    param, grad, exp_avg, exp_avg_sq, all `[n]`; `master` `[n]` where the format has one; `scalars` `[9]`; where scaled,
    two 0-dim factors; with stochastic rounding, `rounding_words`. With 8-bit moments `[n]` becomes `[n, 256]`, and two
    scales `[n]`, two fp32 tensors `[n, 256]` for the new moments (exp_avg and exp_avg_sq are only read then), and a one
    for each row, `[n]`, come before the scalars, and the two `value_table`s at the end. What is
    multiplied by something that could vary by row stays in the one loop over rows.
    """
    fmt = key.fmt
    row = (QUANT_BLOCK,) if fmt.quantised else ()
    runs = [(fmt.param_dtype, row), (fmt.grad_dtype, row), (fmt.moment_dtype, row), (fmt.moment_dtype, row)]
    if fmt.master:
        runs.append((torch.float32, row))
    if fmt.quantised:
        runs += [(torch.float32, ()), (torch.float32, ()), (torch.float32, row), (torch.float32, row)]
        runs.append((torch.float32, ()))
    tables: list[tuple[torch.dtype, tuple[int, ...]]] = [(torch.float32, (len(AdamScalars._fields),))]
    if key.scaled:
        tables += [(torch.float32, ()), (torch.float32, ())]
    if fmt.stochastic:
        tables.append((torch.int32, (2 + len(_STREAMS),)))
    if fmt.quantised:
        tables += [(torch.float32, (256,)), (torch.float32, (256,))]
    return compile_pass(functools.partial(_update, key), runs, tables, parallel=key.parallel)


def rounding_words(key: RoundingKey, first_index: int) -> Tensor:
    """int32 `[5]`: what `chunkc.kernels.rounding.random_bits16` needs for elements from `first_index` on.

    The lower word of the first index and of the key; for each stream, what is added between the two rounds of mixing.
    """
    high = (first_index >> 32) & 0x7FFFFFFF
    offsets = [high * HIGH_FACTOR + key.high + stream * STREAM_FACTOR for stream in _STREAMS]
    words = np.array([first_index, key.low, *offsets], dtype=object) & _MASK32
    return host_tensor(words.astype(np.uint32).view(np.int32), np.int32)


def _update(key: AdamPass, *arguments: Tensor) -> tuple[()]:
    """What is compiled. The order of operations is the reference's."""
    fmt, rest = key.fmt, list(arguments)

    def take(count: int) -> list[Tensor]:
        taken, rest[:] = rest[:count], rest[count:]
        return taken

    param, grad, exp_avg, exp_avg_sq = take(4)
    target = take(1)[0] if fmt.master else param
    scales_and_new = take(4) if fmt.quantised else []
    ones = take(1)[0].unsqueeze(1) if fmt.quantised else None
    scalars = AdamScalars.of(take(1)[0])
    factors = take(2) if key.scaled else []
    words = take(1)[0] if fmt.stochastic else None

    wide = grad.to(torch.float32)
    for factor in factors:
        wide = wide * factor
    wide = wide * scalars.grad_sign
    if fmt.quantised:
        old_avg, old_avg_sq = (
            table[codes.to(torch.int64)] * scale.unsqueeze(1)
            for table, codes, scale in zip(take(2), (exp_avg, exp_avg_sq), scales_and_new[:2], strict=True)
        )
    else:
        old_avg, old_avg_sq = exp_avg.to(torch.float32), exp_avg_sq.to(torch.float32)
    old_target = target.to(torch.float32)
    if key.l2:
        wide = wide + old_target * scalars.l2
    decayed = old_target * scalars.decay
    # Tensor.lerp_: from the nearer end, so that a weight of 1 gives the gradient itself.
    near: Any = scalars.lerp_weight < 0.5  # a tensor
    base = torch.where(near, old_avg, wide)
    coefficient = torch.where(near, scalars.lerp_weight, scalars.lerp_weight - 1)
    new_avg = base + coefficient * (wide - old_avg)
    new_avg_sq = old_avg_sq * scalars.beta2 + scalars.one_minus_beta2 * wide * wide
    denom = new_avg_sq.sqrt() / scalars.bias_correction2_sqrt + scalars.eps
    new_target = decayed + scalars.neg_step_size * new_avg / denom

    scattered = None if words is None else _mix32(_indices(param) + words[0] ^ words[1])

    def store(place: Tensor, value: Tensor, stream: int) -> None:
        if scattered is not None and words is not None and place.dtype == torch.bfloat16:
            value = _stochastic(value, _mix32(scattered + words[2 + stream]) & 0xFFFF)
        place.copy_(value)  # rounds to nearest even

    if fmt.quantised:
        exp_avg, exp_avg_sq = scales_and_new[2:]
    store(exp_avg, new_avg, EXP_AVG_STREAM)
    store(exp_avg_sq, new_avg_sq, EXP_AVG_SQ_STREAM)
    if ones is not None:
        new_target = new_target * ones
    if target is not param:
        target.copy_(new_target)
        if ones is not None:
            new_target = new_target * ones
    store(param, new_target, PARAM_STREAM)
    return ()


def _indices(like: Tensor) -> Tensor:
    """0, 1, ... as int32 in the shape of `like`; wraps around."""
    indices = torch.arange(like.shape[0], dtype=torch.int32, device=like.device)
    if like.dim() == 1:
        return indices
    return indices.unsqueeze(1) * like.shape[1] + torch.arange(like.shape[1], dtype=torch.int32, device=like.device)


def _mix32(value: Tensor) -> Tensor:
    """`chunkc.kernels.rounding.mix32` on int32 that stands for uint32."""
    value = value ^ ((value >> 16) & 0xFFFF)
    value = value * MIX_FACTORS[0]
    value = value ^ ((value >> 15) & 0x1FFFF)
    value = value * MIX_FACTORS[1]
    return value ^ ((value >> 15) & 0x1FFFF)


def _stochastic(values: Tensor, random: Tensor) -> Tensor:
    """fp32 `values` rounded to what bf16 holds, still as fp32; infinities and NaN as they are."""
    rounded = ((values.view(torch.int32) + random) & -65536).view(torch.float32)
    return torch.where(values.abs() < float("inf"), rounded, values)
