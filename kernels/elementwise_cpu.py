"""Update elementwise on the CPU, in one fused pass over memory.

Inductor generates the pass (see `chunkc.kernels.fused_pass`), except for bf16 parameters with masters that are
rounded to nearest and have no 8-bit moments: `chunkc.kernels.cpu_loop` is a loop for these.

Two entries: `prepare` for whole tensors one after the other, and `chunk_update` for a tile of a chunk group in any
`UpdateFormat`. Both run the same passes, compiled once per format.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chunkc.ir.layout import GRAD, PARAM
from chunkc.ir.states import UNSIGNED, is_scale, scale_of
from chunkc.kernels.cpu_loop import has_loop, library, loop_pass
from chunkc.kernels.cpu_pass import UpdatePass, rounding_words, update_pass
from chunkc.kernels.elementwise_triton import WorkTable, check_work
from chunkc.kernels.formats import (
    NO_SCALE,
    QUANT_BLOCK,
    GradScale,
    RoundingKey,
    Slots,
    Span,
    UpdateFormat,
    checked_spans,
    mark_written,
)
from chunkc.kernels.fused_pass import SERIAL_NUM_ELEMENTS, Pass, host_empty, host_tensor
from chunkc.kernels.quant_cpu import bucket_table, quantise_pass, value_table
from chunkc.torch_private.fake import disable_current_modes

_NUM_CACHED_HYPERS = 256
_PIECE_NUM_BLOCKS = 256  # 64K elements per thread: with new moments in fp32 they still fit its cache


def prepare(fmt: UpdateFormat, hyper: Any) -> Callable[[list[Tensor]], None]:
    """Prepare the update for given hyper-parameters, for many spans of a step, without scaled gradients.

    Args:
        fmt: rounds to nearest, without 8-bit moments.

    Returns:
        A function of a list [param, grad, moments] and, where the format has one, master, as in `chunk_update`. It
        empties the list; checks and version counters are left to the caller.
    """
    scalars = _scalars(fmt, hyper)
    l2 = fmt.needs_l2(hyper.scalars())

    passes: dict[bool, Pass] = {}

    def update(tensors: list[Tensor]) -> None:
        num_elements = tensors[0].numel()
        parallel = num_elements >= SERIAL_NUM_ELEMENTS
        if num_elements:
            if parallel not in passes:
                passes[parallel] = _pass_of(UpdatePass(fmt, l2=l2, scaled=False, parallel=parallel))
            tensors.append(scalars)
            passes[parallel](tensors)

    return update


@torch.compiler.disable
@torch.no_grad()
def chunk_update(
    fmt: UpdateFormat,
    slots: Slots,
    spans: Sequence[Span],
    scalars: Tensor,
    *,
    scale: GradScale = NO_SCALE,
    key: RoundingKey | None = None,
    first_element: int = 0,
) -> None:
    """Update a tile of a chunk group in CPU memory in any format, in place, in one pass per span.

    Computes the bits of `chunkc.kernels.reference.chunk_update`, except for the bits of NaNs. Allocates nothing through
    PyTorch, but for 8-bit moments one number a block of a piece. The factors are read inside the pass, `found_inf`
    before it: where it is set, no other memory is read. 8-bit moments go in pieces that fit the cache: moments to fp32
    and the update, then moments to 8 bits.

    Args:
        scalars, scale, key, first_element: as for the reference.

    Raises:
        ValueError: a tensor is not on the CPU, or see `check_update` and `check_spans`.
    """
    checked = checked_spans(fmt, slots, spans, scalars, scale, key, first_element)
    with disable_current_modes():
        if _skips(slots, scale):
            return
        for span in _cut_where_low_bits_wrap(checked, first_element):
            _update_span(fmt, slots, span, scalars, scale, key, first_element)
    mark_written(fmt, slots)


@torch.compiler.disable
@torch.no_grad()
def summed_update(
    fmt: UpdateFormat, slots: Slots, work: WorkTable, scalars: Tensor, sums: Tensor, *, scale: GradScale = NO_SCALE
) -> None:
    """Update the rows of a table in place, and write the sums of each one's terms, a row by one thread.

    So sums do not depend on the number of threads. Where `found_inf` is set, no other memory is read.

    Args:
        fmt: has terms that are added up.
        scalars, scale: as for the reference.
        sums: fp32 `[num_sums, num_rows]`, as of `chunkc.kernels.elementwise_triton.update`.

    Raises:
        ValueError: a tensor is not on the CPU, or see `check_work`.
    """
    check_work(fmt, slots, work, scalars, scale, None, 0, sums)
    with disable_current_modes():
        if _skips(slots, scale):
            return
        states = slots.states()
        factors = [factor for factor in (scale.unscale, scale.clip) if factor is not None]
        buffers = [slots.param, slots.grad, *[states[kind] for kind in fmt.kinds], slots.master, scalars]
        pointers = [0 if buffer is None else buffer.data_ptr() for buffer in buffers]
        pointers += [(_ONE if factor is None else factor).data_ptr() for factor in (scale.unscale, scale.clip)]
        threads = torch.get_num_threads() if slots.param.numel() >= SERIAL_NUM_ELEMENTS else 1
        sizes = sums.data_ptr(), work.rows.data_ptr(), sums.stride(0), len(work.rows)
        library(fmt, l2=False, scaled=bool(factors)).update(*pointers, *sizes, threads)
    mark_written(fmt, slots)


def _skips(slots: Slots, scale: GradScale) -> bool:
    """Whether an update changes nothing.

    Raises:
        ValueError: a tensor is not on the CPU.
    """
    if not slots.param.is_cpu:
        raise ValueError(f"updates on the CPU need tensors on the CPU, got {slots.param.device}")
    return scale.found_inf is not None and scale.found_inf.item() != 0


def warm_up_format(fmt: UpdateFormat, *, l2: bool = False, scaled: bool = False) -> None:
    """Compile the passes of `chunk_update` for a format. Idempotent.

    Args:
        l2: for weight decay that is added to the gradient.
        scaled: for gradients with a factor (`GradScale.unscale` or `clip`).
    """
    for parallel in (False, True):
        _pass_of(UpdatePass(fmt, l2=l2, scaled=scaled, parallel=parallel))
        if fmt.quantised:
            quantise_pass(parallel)


def _update_span(
    fmt: UpdateFormat,
    slots: Slots,
    span: Span,
    scalars: Tensor,
    scale: GradScale,
    key: RoundingKey | None,
    first_element: int,
) -> None:
    row = scalars[span.group]
    scaled = scale.unscale is not None or scale.clip is not None
    l2 = fmt.needs_l2(fmt.scalars(*row.tolist()))
    factors = [_ONE if factor is None else factor for factor in (scale.unscale, scale.clip)] if scaled else []

    def call(part: Slots, begin: int, scratch: Sequence[Tensor]) -> None:
        """Update `part`, which begins at element `begin` of the tile; 8-bit moments in whole blocks."""
        parallel, states = part.param.numel() >= SERIAL_NUM_ELEMENTS, part.states()
        tensors = [part.param.detach(), part.grad, *[states[kind] for kind in fmt.kinds]]
        if part.master is not None:
            tensors.append(part.master)
        new_moments: list[Tensor] = []
        if fmt.quantised:
            tensors = [tensor.view(-1, QUANT_BLOCK) for tensor in tensors]
            new_moments = [moment[: len(tensors[0])] for moment in scratch]
            ones = host_empty((len(tensors[0]),), torch.float32).fill_(1)
            tensors += [*[states[scale_of(kind)] for kind in fmt.kinds], *new_moments, ones]
        tensors += [row, *factors]
        if key is not None:
            tensors.append(rounding_words(key, first_element + begin))
        if fmt.quantised:
            tensors += [value_table(signed=kind not in UNSIGNED) for kind in fmt.kinds]
        _pass_of(UpdatePass(fmt, l2=l2, scaled=scaled, parallel=parallel))(tensors)
        for kind, values in zip(fmt.kinds, new_moments):
            codes, scales, table = states[kind], states[scale_of(kind)], bucket_table(signed=kind not in UNSIGNED)
            quantise_pass(parallel)([values, codes.view(-1, QUANT_BLOCK), scales, table])

    if not fmt.quantised:
        call(slots.part(span.begin, span.end), span.begin, ())
        return
    num_blocks = (span.end - span.begin) // QUANT_BLOCK
    piece_num_blocks = min(max(num_blocks, 1), _PIECE_NUM_BLOCKS * torch.get_num_threads())
    scratch = host_empty((len(fmt.kinds), piece_num_blocks, QUANT_BLOCK), torch.float32).unbind()
    whole_end = span.begin + num_blocks * QUANT_BLOCK
    for begin in range(span.begin, whole_end, piece_num_blocks * QUANT_BLOCK):
        call(slots.part(begin, min(begin + piece_num_blocks * QUANT_BLOCK, whole_end)), begin, scratch)
    if whole_end < span.end:
        part = slots.part(whole_end, span.end)
        padded = _padded_block(part)
        call(padded, whole_end, scratch)
        part.param.copy_(padded.param[: len(part.param)])
        for kind, state in part.states().items():
            if not is_scale(kind):
                state.copy_(padded.states()[kind][: len(state)])


_ONE = host_tensor(1.0, np.float32)


def _padded_block(part: Slots) -> Slots:
    """Pad a part of a block to a whole block, by repeating the last element, so that the scale is unchanged."""

    def padded(tensor: Tensor) -> Tensor:
        block = host_empty((QUANT_BLOCK,), tensor.dtype)
        block[: len(tensor)] = tensor
        block[len(tensor) :] = tensor[-1]
        return block

    states = {kind: tensor if is_scale(kind) else padded(tensor) for kind, tensor in part.states().items()}
    return type(part).of({PARAM: padded(part.param), GRAD: padded(part.grad), **states})


def _cut_where_low_bits_wrap(spans: Sequence[Span], first_element: int) -> Iterator[Span]:
    """Cut spans where the upper 32 bits of the elements' indices change: passes use the lower 32 bits only."""
    for begin, end, group in spans:
        while begin < end:
            cut = min(end, ((first_element + begin >> 32) + 1 << 32) - first_element)
            yield Span(begin, cut, group)
            begin = cut


@functools.lru_cache(maxsize=_NUM_CACHED_HYPERS)
def _scalars(fmt: UpdateFormat, hyper: Any) -> Tensor:
    """Make the scalars as `[num_scalars]`, cached."""
    with disable_current_modes():
        return fmt.scalar_table([hyper])[0]


def _pass_of(key: UpdatePass) -> Pass:
    if has_loop(key.fmt):
        return loop_pass(key.fmt, l2=key.l2, scaled=key.scaled, parallel=key.parallel)
    return update_pass(key)
