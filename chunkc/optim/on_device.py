"""What updates on a GPU need besides kernels: tables of work that stay there, and scalars that are sent at each step.

A table of work says who updates what; it depends on a tile's spans alone. Scalars change with every step; they are a
few hundred bytes, copied from pinned memory behind the host's back. Nothing here waits for the device.

A user may take steps on several streams, and backwards that update on others. Then these tables are made on one stream,
and read, written anew and freed on another, of which the user knows nothing (see `LaunchOrder`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from chunkc.kernels.formats import UpdateFormat
from chunkc.optim.pending_steps import decided

TABLE_NBYTES = 2 << 20
"""Tables of work that are kept on a device, in bytes: those used last (`machines.devices.TABLES_NBYTES` has room)."""

POINTER_OFFSETS_NBYTES = 1 << 20
"""Distances between tensors that one launch updates, in bytes: those used last, beside the tables."""

TEMPORARIES_NBYTES = 1 << 20
"""Temporary tensors of an update without a kernel, in bytes, beside the tables and pointer offsets."""


def computes_by_triton(device: torch.device) -> bool:
    """Whether updates on a device are Triton's; on the CPU they are passes that Inductor or a C++ compiler made."""
    return device.type == "cuda"


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on the device, by a copy that nobody waits for: torch keeps pinned memory until it is done."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class LaunchOrder:
    """Orders an updater's launches on a device, whichever streams they are on: they have tables in common.

        with order.turn():                       # after the launch before, of another stream
            launch(order.reads(table))           # whose memory is not another's before this stream has read it

    On the CPU, and as long as all launches are on one stream, nothing waits for anything.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._end: torch.cuda.Event | None = None
        self._are_several = False

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """What is enqueued inside comes after all that was in earlier turns."""
        if self._device.type == "cpu":
            yield
            return
        stream = torch.cuda.current_stream(self._device)
        if self._end is None:
            self._end = torch.cuda.Event()
        elif stream != self._stream:
            self._are_several = True
            stream.wait_event(self._end)
        try:
            yield
        finally:
            self._end.record(stream)  # what waited for it waits for what it was recorded for by then
            self._stream = stream

    def reads(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that this turn's launches read, and that may be freed on another stream."""
        if self._are_several and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor


@dataclass(eq=False)
class Sent:
    """A tensor of the CPU, and its copy on the device."""

    here: torch.Tensor
    on_device: torch.Tensor

    def follow(self, now: torch.Tensor) -> None:
        """Send another one in its place, in the stream's order: work that was enqueued before reads the former."""
        if not torch.equal(now, self.here):
            self.here = now
            self.on_device.copy_(now if self.on_device.device.type == "cpu" else now.pin_memory(), non_blocking=True)


class StepScalars:
    """The hyper-parameters of one step of an optimizer, as rows of one table on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[Any, int] = {}
        self._tables: dict[tuple[type, torch.dtype], torch.Tensor] = {}

    def row(self, hyper: Any) -> int:
        """The row of these hyper-parameters, which may be in doubt; a new one if need be."""
        found = self._rows.get(hyper)
        if found is None:
            found = self._rows[hyper] = len(self._rows)
            self._tables.clear()
        return found

    def table(self, fmt: UpdateFormat) -> torch.Tensor:
        """All rows so far, `[num_rows, num_scalars]`, as updates of a format read them."""
        key = fmt.scalars, fmt.wide_dtype
        if key not in self._tables:
            self._tables[key] = decided(list(self._rows), fmt.scalar_table, lambda table: upload(table, self._device))
        return self._tables[key]
