"""Provide home memory that a GPU copies from and to at the link's full rate, and reads and writes in place.

    home = PinnedHome(TorchGpu())
    region = home.allocate(1 << 26)                                       # mapped and pinned, exactly so large
    view = home.tensor(region, torch.bfloat16, (256, 64), (64, 1), 4096)  # a CUDA tensor over host memory
    with torch.cuda.stream(stream):
        home.read(region, 4096, slot)                                     # returns at once

Each region is a memory map of its own, pinned by itself (cudaHostRegister): torch's caching host allocator would round
up to powers of two. A region without views is unpinned and unmapped by a thread, once the device has finished its work
on it (see `_Unpinner`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import logging
import mmap
import os
import resource
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from chunkc.ir.errors import HomeError
from chunkc.ir.units import format_nbytes
from chunkc.runtime.device.gpu import Gpu
from chunkc.runtime.device.numa import prefer_node
from chunkc.runtime.device.streams import POLL_S
from chunkc.runtime.storage.device_views import note_view
from chunkc.runtime.storage.homes import Home, Region, home_view_span
from chunkc.runtime.storage.maps import Mapping, map_memory

logger = logging.getLogger(__name__)

CAST_PIECE_NBYTES = 4 << 20
"""Bytes of a cast piece, after the cast."""
_NUM_CAST_BUFFERS = 2
"""The host fills one buffer while the device copies from the other."""


class _PinnedMapping(Mapping):
    """Memory of one region; `bytes` is all of it as a CPU tensor. Unpinned after its last user is gone."""

    def __init__(self, memory: mmap.mmap, nbytes: int) -> None:
        super().__init__(memory)
        self.nbytes = nbytes
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.unpin: weakref.finalize | None = None


class PinnedHome(Home):
    """Home memory in pinned RAM. Home views are tensors on the GPU, over that very RAM.

    Args:
        gpu: the device that copies and reads it.
        allow_unpinned: where memory cannot be pinned, use it unpinned, with a warning, even where the device cannot
            read it. Home views are then CPU tensors: for data that eager code need not find on the device, such as
            optimizer states. A device that can read unpinned memory (see `Gpu.view_pageable`) has views of it in any
            case.
    """

    def __init__(self, gpu: Gpu, *, allow_unpinned: bool = False) -> None:
        super().__init__()
        self._gpu = gpu
        self._allow_unpinned = allow_unpinned
        self._warned = False
        self._noted_nbytes, self._pinning_s = 0, 0.0
        self._is_near = False  # whether the system was told to take pages from the GPU's NUMA node
        self._casting = threading.Lock()
        self._pinned: dict[int, int] = {}  # nbytes by address; the thread that unpins pops from it

    @property
    def pinned_nbytes(self) -> int:
        """Bytes pinned now, in whole pages, including freed regions that still have views.

        Blocks until regions without views are unpinned.
        """
        unpinner.drain()
        return sum(list(self._pinned.values()))

    def tensor(
        self, region: Region, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset_nbytes: int
    ) -> torch.Tensor:
        """Make a home view as `Home.tensor`, but on the GPU; on the CPU where the GPU cannot read the memory."""
        nbytes = home_view_span(dtype, shape, stride, offset_nbytes) * dtype.itemsize
        mapping = self._find_pinned(region, offset_nbytes, nbytes)
        note_view(mapping, functools.partial(PinnedHome, self._gpu, allow_unpinned=self._allow_unpinned), self._gpu)
        if nbytes and mapping.unpin is not None:
            flat = self._gpu.view(mapping.address + offset_nbytes, nbytes, mapping)
            return reshaped(flat, dtype, shape, stride)
        view = super().tensor(region, dtype, shape, stride, offset_nbytes)
        if mapping.unpin is None and self._gpu.cannot_view_pageable() is not None:
            return view
        return on_device(self._gpu, view)

    def only_launches(self, region: Region) -> bool:
        """Whether the region is pinned: else the driver may read it before the stream gets there, and may block."""
        return self._find_pinned(region, 0, 0).unpin is not None

    def read(self, region: Region, offset_nbytes: int, destination: torch.Tensor) -> None:
        """Fill `destination`, a contiguous device tensor, on the current stream. Blocks unless it `only_launches`."""
        target = flat_bytes(destination)
        self._copy(region, target, self._part(region, offset_nbytes, target.numel()))

    def write(self, region: Region, offset_nbytes: int, source: torch.Tensor) -> None:
        """Copy `source` into the region on the current stream; otherwise as `read`."""
        data = flat_bytes(source)
        self._copy(region, self._part(region, offset_nbytes, data.numel()), data)

    def read_cast(self, region: Region, dtype: torch.dtype, destination: torch.Tensor) -> None:
        """Fill `destination`, a flat device tensor, with the region's elements, cast on the host, piece by piece.

        Blocks until the last piece's copy is enqueued on the current stream.
        """
        source = self._part(region, 0, destination.numel() * dtype.itemsize).view(dtype)
        num_elements = CAST_PIECE_NBYTES // destination.dtype.itemsize
        with self._casting:
            parts = zip(source.split(num_elements), destination.detach().split(num_elements))
            for (buffer, copied), (elements, part) in zip(itertools.cycle(self._cast_buffers), parts):
                copied.synchronize()
                piece = buffer.view(destination.dtype)[: part.numel()]
                piece.copy_(elements)
                self._gpu.copy(part, piece)
                copied.record(self._gpu.current_stream())

    @functools.cached_property
    def _cast_buffers(self) -> list[tuple[torch.Tensor, Any]]:
        """Pinned buffers for cast pieces, each with the event of the last copy out of it."""
        regions = [self.allocate(CAST_PIECE_NBYTES) for _ in range(_NUM_CAST_BUFFERS)]
        return [(self.bytes(region), self._gpu.new_event()) for region in regions]

    def _copy(self, region: Region, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._gpu.copy(destination, source)
        if not self.only_launches(region):  # CUDA does not promise that such a copy is over, nor that it is not
            self._gpu.current_stream().synchronize()

    def bytes(self, region: Region) -> torch.Tensor:
        """View a region's bytes as a flat CPU tensor, for the host to read and write. The region must not be freed."""
        return self._part(region, 0, region.nbytes)

    def _part(self, region: Region, offset_nbytes: int, nbytes: int) -> torch.Tensor:
        return self._find_pinned(region, offset_nbytes, nbytes).bytes[offset_nbytes : offset_nbytes + nbytes]

    def _find_pinned(self, region: Region, offset_nbytes: int, nbytes: int) -> _PinnedMapping:
        mapping = self._find(region, offset_nbytes, nbytes)
        assert isinstance(mapping, _PinnedMapping)
        return mapping

    def _map(self, nbytes: int) -> _PinnedMapping:
        unpinner.drain()  # memory to be unpinned may be needed for this map
        memory = map_memory(nbytes)
        _advise(memory, "MADV_HUGEPAGE")  # to touch and pin 100 GiB takes minutes in pages of 4 KiB
        # A fork would copy all pinned pages there and then (Linux 5.10 on): no child gets them, as none can use CUDA.
        _advise(memory, "MADV_DONTFORK")
        mapping = _PinnedMapping(memory, nbytes)
        began_s = time.perf_counter()
        node = self._gpu.numa_node()
        self._is_near = node is not None and prefer_node(mapping.address, nbytes, node)
        populate(mapping.address, nbytes)
        problem = self._gpu.pin(mapping.address, nbytes)
        if problem is None:
            self._pinned[mapping.address] = nbytes
            unpinner.start()
            mapping.unpin = weakref.finalize(mapping, _retire, self._gpu, self._pinned, mapping.address, memory)
            mapping.unpin.atexit = False  # the process's end does it
            _alive.add(mapping)
            self._note(nbytes, time.perf_counter() - began_s)
        elif not self._allow_unpinned and self._gpu.cannot_view_pageable() is not None:
            raise HomeError(
                f"cannot pin {format_nbytes(nbytes)} of host memory in addition to {format_nbytes(self.pinned_nbytes)} "
                f"pinned so far ({problem}; the limit of lockable memory is {_lockable()}): raise the limit "
                '(`ulimit -l`), free host memory, or use home="disk"'
            )
        elif not self._warned:
            self._warned = True
            logger.warning(
                "%s of host memory could not be pinned (%s; the limit of lockable memory is %s) and stays unpinned: "
                "its copies pass through the driver's buffers at about half the rate, and a thread waits for each",
                format_nbytes(nbytes),
                problem,
                _lockable(),
            )
        return mapping

    def _note(self, nbytes: int, seconds: float) -> None:
        """Log the progress of pinning, at every few GiB."""
        before, self._noted_nbytes = self._noted_nbytes, self._noted_nbytes + nbytes
        self._pinning_s += seconds
        if before // _LOG_EVERY_NBYTES != self._noted_nbytes // _LOG_EVERY_NBYTES:
            logger.info(
                "pinned %s of host memory so far, in %.1f s%s",
                format_nbytes(self._noted_nbytes),
                self._pinning_s,
                f", on the GPU's NUMA node {self._gpu.numa_node()} while it has room" if self._is_near else "",
            )


def populate(address: int, nbytes: int) -> None:
    """Populate a map's pages by several threads: the kernel zeroes them, which is most of the time of pinning.

    Without effect before Linux 5.14: pinning then does it, on one thread.
    """
    pieces = [(address + begin, min(_PIECE_NBYTES, nbytes - begin)) for begin in range(0, nbytes, _PIECE_NBYTES)]
    if len(pieces) == 1:
        return  # pinning alone is as fast
    with ThreadPoolExecutor(min(len(pieces), _MAX_THREADS, torch.get_num_threads())) as pool:
        for address, size in pieces:
            pool.submit(_madvise, address, size, _MADV_POPULATE_WRITE)


_MADV_POPULATE_WRITE = 23
_PIECE_NBYTES = 64 << 20
_MAX_THREADS = 8
_LOG_EVERY_NBYTES = 4 << 30
_madvise = ctypes.CDLL(None).madvise  # not mmap.madvise, which holds the interpreter's lock
_madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


@dataclass(frozen=True)
class _Retired:
    """Pinned memory without views. The device may still have to copy from or to it.

    Attributes:
        pinned: the home's table of pinned bytes, with an entry at `address`.
        memory: unmapped with its last reference: not before it is unpinned.
    """

    gpu: Gpu
    pinned: dict[int, int]
    address: int
    memory: mmap.mmap

    def unpin(self) -> None:
        problem = self.gpu.unpin(self.address)
        nbytes = self.pinned.pop(self.address)
        if problem is not None:  # logged: on this thread no caller could handle an exception
            logger.warning("could not unpin %s of host memory: %s", format_nbytes(nbytes), problem)
            _never_unmapped.append(self.memory)  # the driver may still take memory at its address for pinned


_END_S = 30.0
"""How long the end of the process waits for memory being unpinned: a hung device never releases it."""


class _Unpinner:
    """Thread that unpins memory.

    The last view of a region may go at any time, in a finalizer: between two launches, where a wait for the device and
    the driver would be a stall, or while a user captures a graph, which a wait for the device breaks. So finalizers
    queue the memory here and make no call of CUDA.
    """

    def __init__(self) -> None:
        self._retired: SimpleQueue[_Retired | threading.Event] = SimpleQueue()  # its `put` is safe in a finalizer
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def start(self) -> None:
        """Start the thread, unless it runs: a finalizer could not start one."""
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="chunkc-unpin", daemon=True)
                self._thread.start()

    def put(self, retired: _Retired) -> None:
        """Unpin memory soon. Never blocks: for finalizers."""
        self._retired.put(retired)

    def drain(self) -> None:
        """Block until all memory queued so far is unpinned and unmapped."""
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._retired.put(reached := threading.Event())
        while not reached.wait(POLL_S) and self._thread.is_alive():
            continue

    def end(self) -> None:
        """Stop unpinning, and block until the thread has finished its current call and ended.

        Called at the process's end, before the interpreter's: that ends a Python thread as it returns from a call of
        CUDA, within C++ frames that must not be unwound, and the process aborts.
        """
        self._is_over = True
        if self._thread is not None:
            self._retired.put(threading.Event())  # it may be waiting
            self._thread.join(_END_S)

    def _run(self) -> None:
        while not self._is_over:
            entry = self._retired.get()
            if isinstance(entry, _Retired):
                entry.unpin()
            else:
                entry.set()
            del entry  # unmaps the memory now, and not with the next entry


unpinner = _Unpinner()
atexit.register(lambda: unpinner.end())  # looked up late: a child of a fork has its own

_alive: weakref.WeakSet[_PinnedMapping] = weakref.WeakSet()
_kept_in_child: list[object] = []
_never_unmapped: list[mmap.mmap] = []


def _retire(gpu: Gpu, pinned: dict[int, int], address: int, memory: mmap.mmap) -> None:
    """Queue a mapping's memory for unpinning: the mapping's finalizer."""
    gpu.note_current_stream()
    unpinner.put(_Retired(gpu, pinned, address, memory))


def _after_fork_in_child() -> None:
    """Detach finalizers in a child of `os.fork`, and replace the unpinner, as its thread is the parent's.

    The child has none of this memory: to unmap it there could unmap other memory at its address, and to unpin it needs
    CUDA, which no child can use.
    """
    global unpinner
    for mapping in _alive:
        _kept_in_child.append(mapping)
        if mapping.unpin is not None:
            mapping.unpin.detach()
    _kept_in_child.append(unpinner)
    unpinner = _Unpinner()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _advise(memory: mmap.mmap, name: str) -> None:
    """Advise the kernel on a map, ignoring systems without this advice."""
    advice = getattr(mmap, name, None)
    if advice is not None:
        with contextlib.suppress(OSError):
            memory.madvise(advice)


def on_device(gpu: Gpu, view: torch.Tensor) -> torch.Tensor:
    """View a CPU tensor that spans its own storage, over pageable memory, on the device (see `Gpu.view_pageable`)."""
    if view.numel() == 0:
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=gpu.device)
    return reshaped(gpu.view_pageable(view.untyped_storage()), view.dtype, view.shape, view.stride())


def reshaped(flat: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Make another tensor over the storage of a flat one."""
    storage = flat.untyped_storage()
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, tuple(shape), tuple(stride))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor's bytes as flat uint8."""
    assert tensor.is_contiguous(), "homes copy contiguous tensors"
    return tensor.detach().reshape(-1).view(torch.uint8)


def _lockable() -> str:
    soft_nbytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "not set" if soft_nbytes == resource.RLIM_INFINITY else format_nbytes(soft_nbytes)
