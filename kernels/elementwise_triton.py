"""Update elementwise in Triton: one launch per tile of a chunk group, or one launch for many tensors anywhere.

A work table, made once per layout on the host, assigns elements and their group's hyper-parameters to programs.
Importing this needs no Triton; updating does. With `TRITON_INTERPRET=1` set before Triton is first imported the same
code runs on CPU tensors, slowly: for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.layout import PARAM
from chunkc.ir.states import MASTER, UNSIGNED, scale_of
from chunkc.kernels.formats import (
    NO_SCALE,
    QUANT_BLOCK,
    UNIT,
    GradScale,
    RoundingKey,
    Slots,
    Span,
    UpdateFormat,
    check_spans,
    check_tensor,
    check_update,
    mark_written,
)
from chunkc.kernels.quant import codebook, midpoints

NUM_THREADS = 128
BLOCK = 8 * NUM_THREADS
"""Elements a program updates at most: eight per thread, 16 bytes of bf16."""
RAGGED_BLOCK = QUANT_BLOCK
"""Elements that any other program updates at most."""
_MAX_NUM_MOMENTS = 3


@dataclass(frozen=True, slots=True, eq=False)
class WorkTable:
    """Work of each program of a launch: rows (begin, end, group), on the device that updates.

    Args:
        rows: int64 `[num_programs, 3]`, begin and end in elements of the tile; or `[num_programs, 4]`, begin and end in
            elements of a tensor, with the tensor's number last.
        num_elements: the tile, or the first tensor, has at least so many.
        num_groups: the scalars have at least so many rows.
        span_alignment: spans begin at multiples of this (`UpdateFormat.span_alignment`).
        has_long_rows: rows have more elements than a program updates at a time.
    """

    rows: Tensor
    num_elements: int
    num_groups: int
    span_alignment: int
    has_long_rows: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.rows,)

    def sent(self, send: Callable[[Tensor], Tensor]) -> WorkTable:
        """Make the same table of tensors that `send` has copied, such as to a device."""
        return replace(self, rows=send(self.rows))

    def to(self, device: torch.device | str) -> WorkTable:
        """Copy the table to a device."""
        return self.sent(lambda rows: rows.to(device))


def work_table(spans: Sequence[Span], fmt: UpdateFormat) -> WorkTable:
    """Cut spans into the rows of a launch, on the CPU.

    Rows that begin and end at multiples of 16 elements are loaded as vectors; unaligned ends of spans are rows of their
    own. Blocks of 8-bit moments are never cut.

    Raises:
        ValueError: see `check_spans`.
    """
    num_elements = max((span.end for span in spans), default=0)
    num_groups = max((span.group + 1 for span in spans), default=0)
    check_spans(spans, fmt, num_elements=num_elements, num_groups=num_groups)
    rows = rows_of_spans(spans, BLOCK, quantised=fmt.quantised)
    return WorkTable(torch.from_numpy(rows), num_elements, num_groups, fmt.span_alignment)


def work_of_tensors(tensors: Sequence[tuple[int, int]], fmt: UpdateFormat) -> WorkTable:
    """Cut several tensors into the rows of one launch, on the CPU.

    Args:
        tensors: each tensor's number of elements, and its row of scalars.
    """
    tables = [work_table([Span(0, numel, group)], fmt).rows for numel, group in tensors]
    numbers = torch.repeat_interleave(torch.tensor([len(rows) for rows in tables], device="cpu"))
    rows = torch.cat([torch.cat(tables), numbers[:, None]], dim=1)
    return WorkTable(rows, tensors[0][0], max(group for _, group in tensors) + 1, fmt.span_alignment)


def rows_of_spans(spans: Sequence[Span], block: int, *, quantised: bool = False) -> np.ndarray:
    """Cut spans into rows of at most `block` elements: int64 `[num_rows, 3]`, see `WorkTable`."""
    rows = [rows for span in spans for rows in _rows_of_span(span, block, quantised)]
    return np.concatenate([np.empty((0, 3), dtype=np.int64), *rows])


def _rows_of_span(span: Span, block: int, quantised: bool) -> list[np.ndarray]:
    unit = QUANT_BLOCK if quantised and span.end % UNIT else UNIT
    begin = min(-(-span.begin // UNIT) * UNIT, span.end)
    end = max(span.end // unit * unit, begin)
    parts = [(span.begin, begin, RAGGED_BLOCK), (begin, end, block), (end, span.end, RAGGED_BLOCK)]
    return [_rows_of_part(*part, span.group) for part in parts if part[0] < part[1]]


def _rows_of_part(begin: int, end: int, block: int, group: int) -> np.ndarray:
    """Cut elements into rows at multiples of `block`."""
    multiples = np.arange(begin // block * block, end + block, block, dtype=np.int64)
    cuts = np.unique(multiples.clip(begin, end))
    return np.stack([cuts[:-1], cuts[1:], np.full_like(cuts[1:], group)], axis=1)


@torch.no_grad()
@torch.compiler.disable
def update(
    fmt: UpdateFormat,
    slots: Slots,
    work: WorkTable,
    scalars: Tensor,
    *,
    scale: GradScale = NO_SCALE,
    key: RoundingKey | None = None,
    first_element: int = 0,
    pointer_offsets: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:
    """Update a tile of a chunk group, or many tensors, in place, in one launch on the current stream.

    Computes the bits of `chunkc.kernels.reference.chunk_update`. Waits for nothing and allocates nothing but, once per
    device, 4 KiB of tables for 8-bit moments. Elements outside the work table's spans stay as they are.

    Args:
        work: from `work_table`, on the slots' device.
        scalars: `[num_groups, num_scalars]` fp32 on the slots' device, see
            `chunkc.kernels.hyperparameters.scalar_table`.
        scale, key, first_element: as for the reference.
        pointer_offsets: of several tensors, see `chunkc.kernels.pointer_offsets`; slots, key and first element are the
            first tensor's. The others are not checked, and the caller marks all as written.
        sums: fp32 `[num_sums, num_rows]` for the sums of each row's terms, in formats that have any (see
            `chunkc.kernels.summed_work`).

    Raises:
        ValueError: a tensor does not fit the format or the work table.
        UnsupportedError: Triton is not installed, or the slots are not on a device that it compiles for.
    """
    arguments = launch_arguments(
        fmt, slots, work, scalars, scale=scale, key=key, first_element=first_element, pointer_offsets=pointer_offsets,
        sums=sums,
    )  # fmt: skip
    num_programs = len(work.rows)
    if num_programs:
        require_triton(slots.param.device, "chunkc.kernels.elementwise_cpu")
        from chunkc.kernels.elementwise_triton_kernel import elementwise_kernel

        arguments["ARITHMETIC"] = fmt.arithmetic.in_triton
        launch(elementwise_kernel, num_programs, arguments, slots.param)
        if pointer_offsets is None:
            mark_written(fmt, slots)


def launch_arguments(
    fmt: UpdateFormat,
    slots: Slots,
    work: WorkTable,
    scalars: Tensor,
    *,
    scale: GradScale = NO_SCALE,
    key: RoundingKey | None = None,
    first_element: int = 0,
    pointer_offsets: Tensor | None = None,
    sums: Tensor | None = None,
) -> dict[str, Any]:
    """Check the arguments of the kernel, and return all but the rule's code, by name, as `update` launches it.

    Raises:
        ValueError: a tensor does not fit the format or the work table.
    """
    check_work(fmt, slots, work, scalars, scale, key, first_element, sums)
    num_columns = work.rows.shape[1]
    if (num_columns == 4) != (pointer_offsets is not None):
        raise ValueError(
            "pointer offsets go with a work table of several tensors, from work_of_tensors, and with no other"
        )
    return {
        "param": slots.param.detach(),
        "grad": slots.grad,
        "master": slots[MASTER],
        **_moments(fmt, slots),
        "code_tables": _code_tables(slots.param.device) if fmt.quantised else None,
        "work": work.rows,
        "pointer_offsets": pointer_offsets,
        "scalars": scalars,
        "sums": sums,
        "unscale": scale.unscale,
        "clip": scale.clip,
        "found_inf": scale.found_inf,
        "first_element": first_element,
        "key_low": key.low if key is not None else 0,
        "key_high": key.high if key is not None else 0,
        "sums_stride": 0 if sums is None else sums.stride(0),
        "NUM_SCALARS": scalars.shape[1],
        "NUM_MOMENTS": len(fmt.kinds),
        "KEEPS_TARGET": PARAM in fmt.kept,
        "KEEPS_MOMENTS": not fmt.kept.isdisjoint(fmt.kinds),
        "STOCHASTIC": fmt.stochastic,
        "LONG_ROWS": work.has_long_rows,
        "BLOCK": BLOCK,
        "RAGGED_BLOCK": RAGGED_BLOCK,
        "NUM_COLUMNS": num_columns,
        "NUM_POINTER_OFFSETS": 0 if pointer_offsets is None else pointer_offsets.shape[1],
    }


def check_work(
    fmt: UpdateFormat,
    slots: Slots,
    work: WorkTable,
    scalars: Tensor,
    scale: GradScale,
    key: RoundingKey | None,
    first_element: int,
    sums: Tensor | None,
) -> None:
    """Check the arguments of an update by a table of work.

    Raises:
        ValueError: a tensor does not fit the format or the work table.
    """
    check_update(fmt, slots, scalars, scale, key, first_element)
    if work.num_elements > slots.param.numel() or work.num_groups > len(scalars):
        raise ValueError(
            f"the work table is for {work.num_elements} elements and {work.num_groups} groups, the slots have "
            f"{slots.param.numel()} and the scalars {len(scalars)}"
        )
    if work.span_alignment % fmt.span_alignment:
        raise ValueError(f"the work table was not made for {fmt.moments} moments; call work_table with {fmt}")
    if work.rows.device != slots.param.device:
        raise ValueError(f"the work table is on {work.rows.device}, param on {slots.param.device}; use work.to(device)")
    if (sums is None) != (fmt.num_sums == 0):
        raise ValueError(f"sums are {'missing' if sums is None else 'not wanted'} for {fmt}")
    if sums is not None:
        for terms in sums.unbind():
            check_tensor("sums of terms", terms, torch.float32, (len(work.rows),), slots.param.device)


def _moments(fmt: UpdateFormat, slots: Slots) -> dict[str, Any]:
    """Return the kernel's arguments of each moment, None where there is none."""
    assert len(fmt.kinds) <= _MAX_NUM_MOMENTS, fmt
    moments: dict[str, Any] = {}
    for number in range(_MAX_NUM_MOMENTS):
        kind = fmt.kinds[number] if number < len(fmt.kinds) else None
        moments[f"moment_{number}"] = kind and slots[kind]
        moments[f"scale_{number}"] = kind and slots[scale_of(kind)]
        moments[f"TABLE_{number}"] = 512 if kind in UNSIGNED else 0
    return moments


class Address(int):
    """Address of a tensor, as a kernel's argument.

    Triton compiles for it as for the tensor, by `dtype` and `data_ptr`, and launches with it unchecked. For a tensor
    Triton asks the driver for a device pointer, and the driver has none for host memory that is not registered, though
    a device with pageable memory access reads it (`Gpu.view_pageable`).
    """

    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Address:
        address = cls(tensor.data_ptr())
        address.dtype = tensor.dtype
        return address

    def data_ptr(self) -> int:
        return int(self)


def launchable(argument: Any) -> Any:
    """Replace a tensor argument by its address; interpreted kernels take the tensor itself."""
    import triton

    return Address.of(argument) if isinstance(argument, Tensor) and not triton.knobs.runtime.interpret else argument


def launch(kernel: Any, num_programs: int, arguments: Mapping[str, Any], tensor: Tensor) -> None:
    """Launch a Triton kernel on the current stream of a tensor's device; arguments lie in memory that it can read."""
    launchables = {name: launchable(argument) for name, argument in arguments.items()}
    with torch.cuda.device_of(tensor):
        kernel[(num_programs,)](**launchables, **launch_options_on(tensor.device))


def launch_options(backend: str, warp_size: int) -> dict[str, Any]:
    """Choose the kernel's compile options; without contraction, so that every device computes the reference's bits.

    Args:
        backend: Triton's, "cuda" or "hip".
        warp_size: threads per warp or wavefront.
    """
    options = {"num_warps": NUM_THREADS // warp_size, "enable_fp_fusion": False}
    # Without a bound, ptxas aims at 64 registers and spills one in some variants; no variant needs 128.
    return options | ({"maxnreg": 128} if backend == "cuda" else {})


@functools.cache
def launch_options_on(device: torch.device) -> dict[str, Any]:
    """Return `launch_options` of a device, cached for every launch."""
    warp_size = torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32
    return launch_options("hip" if torch.version.hip else "cuda", warp_size)


@functools.cache
def _code_tables(device: torch.device) -> Tensor:
    """Make the tables fp32 `[4, 256]`: values and midpoints (and an unused element) of signed and unsigned codes."""
    rows: list[tuple[float, ...]] = []
    for signed in (True, False):
        rows += [codebook(signed=signed), (*midpoints(signed=signed), 0.0)]
    return torch.tensor(rows, dtype=torch.float32, device=device)


def require_triton(device: torch.device, cpu_module: str) -> None:
    """Check that Triton can compile for the device, or is interpreted.

    Args:
        cpu_module: module that the message recommends for a CPU.

    Raises:
        UnsupportedError: Triton is not installed, or does not compile for the device.
    """
    try:
        import triton
    except ImportError as error:
        raise UnsupportedError("updates in Triton need it installed: pip install 'triton>=3.6'") from error
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise UnsupportedError(
            f"updates in Triton need tensors on a GPU, got {device.type!r}; on the CPU use {cpu_module}"
        )
