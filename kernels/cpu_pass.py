"""Compile CPU passes by Inductor: the reference's operations, in forms that it vectorises.

Integers are 32 bits wide and wrap around, as the vector units' do; a right shift is followed by a mask, since it
copies the sign.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from chunkc.kernels.formats import QUANT_BLOCK, RoundingKey, UpdateFormat
from chunkc.kernels.fused_pass import Pass, compile_pass, host_tensor
from chunkc.kernels.rounding import (
    FIRST_MOMENT_STREAM,
    HIGH_FACTOR,
    MIX_FACTORS,
    PARAM_STREAM,
    STREAM_FACTOR,
)

_NUM_STREAMS = 4  # the parameter and three moments at most
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class UpdatePass:
    """Key of a compiled pass.

    Args:
        l2: weight decay is added to the gradient.
        scaled: gradients are multiplied by two factors first.
        parallel: for as many threads as torch has at the call; otherwise for one.
    """

    fmt: UpdateFormat
    l2: bool
    scaled: bool
    parallel: bool


@functools.cache
def update_pass(key: UpdatePass) -> Pass:
    """Compile a pass over a list of tensors, which it empties.

    The list is: param, grad, moments, all `[n]`; `master` `[n]` where the format has one; `scalars`; where scaled, two
    0-dim factors; with stochastic rounding, `rounding_words`.

    With 8-bit moments `[n]` becomes `[n, 256]`. Before the scalars come a scale `[n]` for each moment, an fp32 tensor
    `[n, 256]` for each new moment (moments are only read then), and ones `[n]`; each moment's `value_table` comes at
    the end. Inductor keeps values in the one loop over rows that are multiplied by a factor that could vary by row.
    """
    fmt = key.fmt
    num_moments = len(fmt.kinds)
    row = (QUANT_BLOCK,) if fmt.quantised else ()
    runs = [(fmt.param_dtype, row), (fmt.grad_dtype, row), *[(fmt.moment_dtype, row)] * num_moments]
    if fmt.master:
        runs.append((torch.float32, row))
    if fmt.quantised:
        runs += [(torch.float32, ())] * num_moments + [(torch.float32, row)] * num_moments
        runs.append((torch.float32, ()))
    tables: list[tuple[torch.dtype, tuple[int, ...]]] = [(fmt.wide_dtype, (len(fmt.scalars._fields),))]
    if key.scaled:
        tables += [(torch.float32, ()), (torch.float32, ())]
    if fmt.stochastic:
        tables.append((torch.int32, (2 + _NUM_STREAMS,)))
    if fmt.quantised:
        tables += [(torch.float32, (256,))] * num_moments
    return compile_pass(functools.partial(_update, key), runs, tables, parallel=key.parallel)


def rounding_words(key: RoundingKey, first_index: int) -> Tensor:
    """Compute the arguments of random bits for elements from `first_index` on, as int32 `[6]`.

    See `chunkc.kernels.rounding.random_bits16`: the lower words of the first index and of the key; for each stream, the
    offset that is added between the two rounds of mixing.
    """
    high = (first_index >> 32) & 0x7FFFFFFF
    offsets = [high * HIGH_FACTOR + key.high + stream * STREAM_FACTOR for stream in range(_NUM_STREAMS)]
    words = np.array([first_index, key.low, *offsets], dtype=object) & _MASK32
    return host_tensor(words.astype(np.uint32).view(np.int32), np.int32)


def _update(key: UpdatePass, *arguments: Tensor) -> tuple[()]:
    """Update all elements: the function that is compiled."""
    fmt, rest = key.fmt, list(arguments)

    def take(count: int) -> list[Tensor]:
        taken, rest[:] = rest[:count], rest[count:]
        return taken

    (param, grad), moments = take(2), take(len(fmt.kinds))
    target = take(1)[0] if fmt.master else param
    scales = take(len(moments)) if fmt.quantised else []
    targets = take(len(moments)) if fmt.quantised else moments
    ones = take(1)[0].unsqueeze(1) if fmt.quantised else None
    scalars = take(1)[0]
    factors = take(2) if key.scaled else []
    words = take(1)[0] if fmt.stochastic else None

    wide = grad.to(fmt.wide_dtype)
    for factor in factors:
        wide = wide * factor
    if fmt.quantised:
        old = [
            table[codes.to(torch.int64)] * scale.unsqueeze(1)
            for table, codes, scale in zip(rest, moments, scales, strict=True)
        ]
    else:
        old = [moment.to(fmt.wide_dtype) for moment in moments]
    new_target, new_moments = fmt.new_values(
        wide, target.to(fmt.wide_dtype), old, scalars, l2=key.l2, root=torch.Tensor.sqrt
    )

    scattered = None if words is None else _mix32(_indices(param) + words[0] ^ words[1])

    def store(destination: Tensor, value: Tensor, stream: int) -> None:
        if scattered is not None and words is not None and destination.dtype == torch.bfloat16:
            value = _stochastic(value, _mix32(scattered + words[2 + stream]) & 0xFFFF)
            if ones is not None:  # up to PyTorch 2.12, Inductor begins with a loop before the rounding and one after it
                value = value * ones
        destination.copy_(value)  # rounds to nearest even

    stored = zip(fmt.kinds, targets, new_moments, strict=True)
    for stream, (kind, moment, value) in enumerate(stored, start=FIRST_MOMENT_STREAM):
        if kind not in fmt.kept:
            store(moment, value, stream)
    if ones is not None:
        new_target = new_target * ones
    if target is not param:
        target.copy_(new_target)
        if ones is not None:
            new_target = new_target * ones
    store(param, new_target, PARAM_STREAM)
    return ()


def _indices(like: Tensor) -> Tensor:
    """Make 0, 1, ... as int32 in the shape of `like`; wraps around."""
    indices = torch.arange(like.shape[0], dtype=torch.int32, device=like.device)
    if like.dim() == 1:
        return indices
    return indices.unsqueeze(1) * like.shape[1] + torch.arange(like.shape[1], dtype=torch.int32, device=like.device)


def _mix32(value: Tensor) -> Tensor:
    """Compute `chunkc.kernels.rounding.mix32` on int32 with the bits of uint32."""
    value = value ^ ((value >> 16) & 0xFFFF)
    value = value * MIX_FACTORS[0]
    value = value ^ ((value >> 15) & 0x1FFFF)
    value = value * MIX_FACTORS[1]
    return value ^ ((value >> 15) & 0x1FFFF)


def _stochastic(values: Tensor, random: Tensor) -> Tensor:
    """Round fp32 `values` to values of bf16, still as fp32; infinities and NaN as they are."""
    rounded = ((values.view(torch.int32) + random) & -65536).view(torch.float32)
    return torch.where(values.abs() < float("inf"), rounded, values)
