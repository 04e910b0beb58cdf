"""A disk as the home behind a GPU: through a few small pinned buffers, piece by piece.

A read fills a buffer from the file while the copies of earlier pieces to the device are under way; a write empties a
buffer into the file while the copies of later pieces from the device are. Both run on the threads of `CudaLink`.

Eager code reads and writes the file in place, through a map: on the CPU, or on a device that can (see
`Gpu.view_pageable`). Map, positional reads and writes share the kernel's page cache, so that each finds what the
others wrote.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.runtime.arena import Arena
from chunkc.runtime.gpu import Gpu
from chunkc.runtime.homes import DiskHome, Region
from chunkc.runtime.pinned import PinnedHome, flat_bytes, on_device, saved_as_cpu


def open_arena(home: str, gpu: Gpu, disk_holds_everything: bool = False) -> Arena:
    """The homes behind a GPU that an option names: `"cpu"`, `"disk"` or `"disk:DIR"`.

    Parameters and gradients need home views on the device: in memory that cannot be pinned they are only where the
    device reads it all the same, optimizer states anywhere. A disk holds the states, and pinned memory the rest; or it
    holds everything, and home views are maps of the file, which cannot be pinned.

    Raises:
        OptionsError: it names none.
        UnsupportedError: a disk is to hold everything, but the device cannot read files in place.
        HomeError: the directory cannot be used, or the buffers for it cannot be pinned.
    """
    kind, colon, directory = home.partition(":")
    pinned = PinnedHome(gpu)
    if home == "cpu":
        return Arena(pinned, PinnedHome(gpu, allow_unpinned=True))
    if kind == "disk" and bool(colon) == bool(directory):
        if disk_holds_everything:
            return Arena(StagedDiskHome(directory or None, gpu, pinned, views_on_device=True))
        return Arena(pinned, StagedDiskHome(directory or None, gpu, pinned))
    raise OptionsError(f'home is "cpu", "disk" or "disk:DIR", not {home!r}')


class StagedDiskHome(DiskHome):
    """A disk home that reads into and writes from device tensors. Its home views are maps of the file.

    Args:
        directory: as for `DiskHome`.
        gpu: what holds the device tensors.
        staging: where the buffers are pinned: `num_pieces` of `piece_nbytes` bytes for each direction.
        views_on_device: home views are the device's tensors, else the CPU's.

    Raises:
        UnsupportedError: views are to be on the device, which cannot read files in place.
        HomeError: the directory cannot be used, or the buffers cannot be pinned.
    """

    def __init__(
        self,
        directory: str | None,
        gpu: Gpu,
        staging: PinnedHome,
        *,
        piece_nbytes: int = 8 << 20,
        num_pieces: int = 3,
        views_on_device: bool = False,
    ) -> None:
        if views_on_device and (problem := gpu.cannot_view_pageable()) is not None:
            raise UnsupportedError(
                f'disk_holds="everything" needs a device that reads files in place. {gpu.device} does not: {problem}. '
                'Use disk_holds="states"'
            )
        super().__init__(directory)
        self._gpu, self._views_on_device = gpu, views_on_device
        self._piece_nbytes = piece_nbytes
        buffers = [staging.bytes(staging.allocate(piece_nbytes)) for _ in range(2 * num_pieces)]
        self._out = buffers[num_pieces:]
        # The buffer used the longest time ago first, with the event of the copy out of it.
        self._in: deque[tuple[torch.Tensor, Any]] = deque((buffer, None) for buffer in buffers[:num_pieces])
        self._reading, self._writing = threading.Lock(), threading.Lock()

    def tensor(
        self, region: Region, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset_nbytes: int
    ) -> torch.Tensor:
        """A home view as `Home.tensor`, or the same on the device."""
        view = super().tensor(region, dtype, shape, stride, offset_nbytes)
        if not self._views_on_device:
            return view
        saved_as_cpu(self._find(region, 0, 0))
        return on_device(self._gpu, view)

    def read(self, region: Region, offset_nbytes: int, destination: torch.Tensor) -> None:
        """Fill `destination`, a contiguous device tensor, with the region's bytes.

        Returns when the last piece is read and its copy enqueued on the current stream; raises as `Home.read`.
        """
        target = flat_bytes(destination)
        with self._reading:
            for begin in range(0, target.numel(), self._piece_nbytes):
                part = target[begin : begin + self._piece_nbytes]
                buffer, copied = self._in[0]
                if copied is not None:
                    copied.synchronize()
                piece = buffer[: part.numel()]
                super().read(region, offset_nbytes + begin, piece)
                self._gpu.copy(part, piece)
                self._in[0] = (buffer, self._record())
                self._in.rotate(-1)

    def write(self, region: Region, offset_nbytes: int, source: torch.Tensor) -> None:
        """Copy `source`, a contiguous device tensor, into the region.

        Returns when all of it is written; raises as `Home.write`.
        """
        data = flat_bytes(source)
        under_way: deque[tuple[int, torch.Tensor, Any]] = deque()
        with self._writing:
            for index, begin in enumerate(range(0, data.numel(), self._piece_nbytes)):
                if len(under_way) == len(self._out):
                    self._finish(region, offset_nbytes, *under_way.popleft())
                part = data[begin : begin + self._piece_nbytes]
                piece = self._out[index % len(self._out)][: part.numel()]
                self._gpu.copy(piece, part)
                under_way.append((begin, piece, self._record()))
            while under_way:
                self._finish(region, offset_nbytes, *under_way.popleft())

    def _finish(self, region: Region, offset_nbytes: int, begin: int, piece: torch.Tensor, copied: Any) -> None:
        copied.synchronize()
        super().write(region, offset_nbytes + begin, piece)

    def _record(self) -> Any:
        event = self._gpu.new_event()
        event.record(self._gpu.current_stream())
        return event
