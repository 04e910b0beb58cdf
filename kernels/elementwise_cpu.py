"""Update elementwise on the CPU, in one pass over memory by a loop in C++ (see `chunkc.kernels.cpu_loop`).

Three entries: `prepare` for whole tensors one after the other, `chunk_update` for a tile of a chunk group, and
`summed_update` for a tile with terms that are added up. All run the same loops, compiled once per format.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chunkc.ir.states import UNSIGNED
from chunkc.kernels.cpp import SERIAL_NUM_ELEMENTS
from chunkc.kernels.cpu_loop import library
from chunkc.kernels.elementwise_triton import WorkTable, check_work
from chunkc.kernels.formats import (
    NO_SCALE,
    GradScale,
    RoundingKey,
    Slots,
    Span,
    UpdateFormat,
    checked_spans,
    mark_written,
)
from chunkc.kernels.host_memory import host_tensor
from chunkc.kernels.pointer_offsets import kinds_of
from chunkc.kernels.quant_cpu import bucket_table, value_table
from chunkc.torch_private.fake import disable_current_modes

_NUM_CACHED_HYPERS = 256
_NO_KEY = RoundingKey(0, 0)


def prepare(fmt: UpdateFormat, hyper: Any) -> Callable[[Sequence[Tensor]], None]:
    """Prepare the update for given hyper-parameters, for many spans of a step, without scaled gradients.

    Args:
        fmt: rounds to nearest, without 8-bit moments.

    Returns:
        A function of [param, grad, moments] and, where the format has one, master, as in `chunk_update`. Checks and
        version counters are left to the caller.
    """
    scalars = _scalars(fmt, hyper)
    loop = library(fmt, l2=fmt.needs_l2(hyper.scalars()), scaled=False).update

    def update(tensors: Sequence[Tensor]) -> None:
        data = _pointers(fmt, tensors)
        num_elements = tensors[0].numel()
        loop(data, scalars.data_ptr(), None, None, num_elements, 0, *_NO_KEY, _num_threads(num_elements))

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

    Computes the bits of `chunkc.kernels.reference.chunk_update`, except for the bits of NaNs. Allocates nothing. The
    factors are read inside the pass, `found_inf` before it: where it is set, no other memory is read.

    Args:
        scalars, scale, key, first_element: as for the reference.

    Raises:
        ValueError: a tensor is not on the CPU, or see `check_update` and `check_spans`.
    """
    checked = checked_spans(fmt, slots, spans, scalars, scale, key, first_element)
    with disable_current_modes():
        if _skips(slots, scale):
            return
        for begin, end, group in _cut_where_low_bits_wrap(checked, first_element):
            row = scalars[group]
            loop = library(fmt, l2=fmt.needs_l2(fmt.scalars(*row.tolist())), scaled=_scaled(scale)).update
            seed = first_element + begin, *(key or _NO_KEY)
            data = _data(fmt, slots.part(begin, end))
            loop(data, row.data_ptr(), *_factors(scale), end - begin, *seed, _num_threads(end - begin))
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
        loop = library(fmt, l2=False, scaled=_scaled(scale)).update
        sizes = sums.data_ptr(), work.rows.data_ptr(), sums.stride(0), len(work.rows)
        threads = _num_threads(slots.param.numel())
        loop(_data(fmt, slots), scalars.data_ptr(), *_factors(scale), *sizes, threads)
    mark_written(fmt, slots)


def warm_up_format(fmt: UpdateFormat, *, l2: bool = False, scaled: bool = False) -> None:
    """Compile the loop of `chunk_update` for a format. Idempotent.

    Args:
        l2: for weight decay that is added to the gradient.
        scaled: for gradients with a factor (`GradScale.unscale` or `clip`).
    """
    library(fmt, l2=l2, scaled=scaled)


def _skips(slots: Slots, scale: GradScale) -> bool:
    """Whether an update changes nothing.

    Raises:
        ValueError: a tensor is not on the CPU.
    """
    if not slots.param.is_cpu:
        raise ValueError(f"updates on the CPU need tensors on the CPU, got {slots.param.device}")
    return scale.found_inf is not None and scale.found_inf.item() != 0


def _data(fmt: UpdateFormat, slots: Slots) -> Any:
    """Make the array of pointers that the loop takes."""
    buffers = [slots[kind] for kind in kinds_of(fmt)]
    if fmt.quantised:
        for kind in fmt.kinds:
            signed = kind not in UNSIGNED
            buffers += [value_table(signed=signed), bucket_table(signed=signed)]
    return _pointers(fmt, buffers)


def _pointers(fmt: UpdateFormat, buffers: Sequence[Tensor | None]) -> Any:
    """Make an array of the buffers' addresses, for each kind of data one: the loop declares them all."""
    addresses = [None if buffer is None else buffer.data_ptr() for buffer in buffers]
    pointers: Any = (ctypes.c_void_p * max(len(addresses), len(kinds_of(fmt))))(*addresses)
    pointers.buffers = buffers  # alive as long as addresses: of tables that two threads make at once, one is kept
    return pointers


def _scaled(scale: GradScale) -> bool:
    return scale.unscale is not None or scale.clip is not None


def _factors(scale: GradScale) -> list[int]:
    return [(_ONE if factor is None else factor).data_ptr() for factor in (scale.unscale, scale.clip)]


_ONE = host_tensor(1.0, np.float32)


def _num_threads(num_elements: int) -> int:
    return torch.get_num_threads() if num_elements >= SERIAL_NUM_ELEMENTS else 1


def _cut_where_low_bits_wrap(spans: Sequence[Span], first_element: int) -> Iterator[Span]:
    """Cut spans where the upper 32 bits of the elements' indices change: loops use the lower 32 bits only."""
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
