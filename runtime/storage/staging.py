"""Use a disk as the home behind a GPU, through a few small pinned buffers, piece by piece.

A read fills several buffers from the file at a time (`disk_reads`), while full buffers are copied to the device; a
write empties a buffer into the file while later pieces are copied from the device. Both run on the threads of
`CudaLink`.

Eager code reads and writes the file in place, through a map: on the CPU, or on a device that can (see
`Gpu.view_pageable`). Map and positional writes share the kernel's page cache, and reads look there first, so all three
are coherent.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.runtime.device.gpu import Gpu
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.device_views import note_view
from chunkc.runtime.storage.disk_reads import NUM_UNDER_WAY, PIECE_NBYTES, read_into_pages, room_for
from chunkc.runtime.storage.homes import DiskHome, Region
from chunkc.runtime.storage.maps import Mapping
from chunkc.runtime.storage.pinned import PinnedHome, flat_bytes, on_device


def open_arena(home: str, gpu: Gpu, disk_holds_everything: bool = False) -> Arena:
    """Open the homes behind a GPU that an option names: `"cpu"`, `"disk"` or `"disk:DIR"`.

    Parameters and gradients need home views on the device: their memory is pinned, or unpinned where the device reads
    unpinned memory too; optimizer states may be in any memory. A disk holds the states, and pinned memory the rest; or
    it holds everything, and home views are maps of the file, which cannot be pinned.

    Raises:
        OptionsError: the option names no home.
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
    """Disk home that reads into and writes from device tensors. Its home views are maps of the file.

    Args:
        directory: as for `DiskHome`.
        gpu: the device of these tensors.
        staging: home of the pinned buffers: `num_pieces` of `piece_nbytes` bytes for each direction, and two pages.
        views_on_device: home views are on the device, else on the CPU.

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
        piece_nbytes: int = PIECE_NBYTES,
        num_pieces: int = NUM_UNDER_WAY,
        views_on_device: bool = False,
    ) -> None:
        if views_on_device and (problem := gpu.cannot_view_pageable()) is not None:
            raise UnsupportedError(
                f'disk_holds="everything" needs a device that reads files in place. {gpu.device} does not: {problem}. '
                'Use disk_holds="states"'
            )
        self._gpu, self._staging, self.is_in_reach = gpu, staging, views_on_device
        self._piece_nbytes = piece_nbytes
        super().__init__(directory, num_under_way=num_pieces)
        self._out = [staging.bytes(staging.allocate(piece_nbytes)) for _ in range(num_pieces)]
        self._copied: list[Any] = [None] * num_pieces  # for each reader, the event of the last copy out of its pages
        self._reading, self._writing = threading.Lock(), threading.Lock()

    def tensor(
        self, region: Region, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset_nbytes: int
    ) -> torch.Tensor:
        """Make a home view as `Home.tensor`, or the same on the device."""
        view = super().tensor(region, dtype, shape, stride, offset_nbytes)
        if not self.is_in_reach:
            return view
        note_view(self._find(region, 0, 0), weakref.ref(self), self._gpu)
        return on_device(self._gpu, view)

    def read(self, region: Region, offset_nbytes: int, destination: torch.Tensor) -> None:
        """Fill `destination`, a contiguous device tensor, with the region's bytes.

        Blocks until the last piece is read and its copy enqueued on the current stream; raises as `Home.read`.
        """
        parts = flat_bytes(destination).split(self._piece_nbytes)
        mapping = self._find(region, offset_nbytes, sum(part.numel() for part in parts))
        num = self._readers.num
        pieces: list[torch.Tensor | None] = [None] * num

        def job_of(index: int) -> Callable[[], None]:
            self._await_copy(index % num)
            begin = offset_nbytes + index * self._piece_nbytes
            return partial(self._fill, pieces, index % num, mapping, begin, parts[index].numel())

        with self._reading, contextlib.closing(self._readers.run(len(parts), job_of)) as read:
            for index in read:
                piece = pieces[index % num]
                assert piece is not None
                self._gpu.copy(parts[index], piece)
                self._copied[index % num] = self._record()

    def read_cast(self, region: Region, dtype: torch.dtype, destination: torch.Tensor) -> None:
        """Fill `destination`, a flat device tensor, with the region's elements, cast on the host; else as `read`."""
        num_elements = self._piece_nbytes // dtype.itemsize
        parts = destination.detach().split(num_elements)
        mapping = self._find(region, 0, destination.numel() * dtype.itemsize)
        num = self._readers.num
        casts = [piece.view(destination.dtype) for piece in self._cast_pieces]

        def job_of(index: int) -> Callable[[], None]:
            self._await_copy(index % num)
            begin, into = index * self._piece_nbytes, casts[index % num][: parts[index].numel()]
            return partial(self._cast_piece, mapping, begin, dtype, self._pages[index % num], into)

        with self._reading, contextlib.closing(self._readers.run(len(parts), job_of)) as read:
            for index in read:
                self._gpu.copy(parts[index], casts[index % num][: parts[index].numel()])
                self._copied[index % num] = self._record()

    @functools.cached_property
    def _cast_pieces(self) -> list[torch.Tensor]:
        """Pinned buffers for cast elements, one for each reader; allocated with the first cast."""
        return [self._staging.bytes(self._staging.allocate(self._piece_nbytes)) for _ in range(self._readers.num)]

    def _await_copy(self, reader: int) -> None:
        """Wait until the piece that this reader has read last is on the device."""
        copied = self._copied[reader]
        if copied is not None:
            copied.synchronize()

    def _fill(self, pieces: list[torch.Tensor | None], reader: int, mapping: Mapping, begin: int, nbytes: int) -> None:
        """Read a piece of the file into the reader's pages, on its thread."""
        with self._problems("read", nbytes):
            pages = self._pages[reader]
            pieces[reader] = read_into_pages(mapping, begin, nbytes, pages, past_cache=self._past_cache)

    def _reader_pages(self, num: int) -> list[torch.Tensor]:
        """Allocate pages for each reader, pinned, so that the device copies from them."""
        return [self._staging.bytes(self._staging.allocate(room_for(self._piece_nbytes))) for _ in range(num)]

    def write(self, region: Region, offset_nbytes: int, source: torch.Tensor) -> None:
        """Copy `source`, a contiguous device tensor, into the region.

        Blocks until all of it is written; raises as `Home.write`.
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
