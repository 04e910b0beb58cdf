"""Provide home memory, for chunks while they are not on the compute tier.

    home = open_home("disk:/data")
    region = home.allocate(1 << 20)                                        # zeros, page aligned
    view = home.tensor(region, torch.bfloat16, (256, 64), (64, 1), 4096)   # a home view: a plain tensor
    home.read(region, 4096, slot)                                          # any thread, without the GIL
    home.write(region, 4096, slot)

Every allocation is a memory map of its own, so nothing here is charged to torch's CPU allocator. A map is
never closed by hand: it goes when the home has dropped it and the last home view is gone.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from chunkc.ir.errors import HomeError, OptionsError
from chunkc.ir.units import format_nbytes
from chunkc.runtime.storage.disk_reads import (
    NUM_UNDER_WAY,
    PIECE_NBYTES,
    WORTH_A_THREAD_NBYTES,
    Readers,
    read_by_way_of,
    read_into_pages,
    room_for,
    write_through_cache,
)
from chunkc.runtime.storage.forks import refuse_in_forks
from chunkc.runtime.storage.maps import Mapping, NamelessFile, home_error, map_memory


@dataclass(frozen=True)
class Region:
    """Memory of one `allocate`: `nbytes` bytes at `offset`, a page-aligned address within that home only."""

    offset: int
    nbytes: int


class Home(abc.ABC):
    """Memory in regions. Any number of threads may `read` and `write`; callers order overlapping accesses.

    Attributes:
        is_shared_with_forks: a child of `os.fork` would share the memory. Its home views raise there.
        is_in_reach: home views are on the device, though the memory is not pinned.
    """

    is_shared_with_forks = False
    is_in_reach = False

    def __init__(self) -> None:
        self._mappings: dict[int, Mapping] = {}
        self._next_offset = 0
        self._lock = threading.Lock()
        self._closed = False

    def bytes(self, region: Region) -> torch.Tensor:
        """View a region's bytes as a flat CPU tensor, for the host to read and write. The region must not be freed."""
        return Home.tensor(self, region, torch.uint8, (region.nbytes,), (1,), 0)

    def memory(self, region: Region) -> Any:
        """Return the buffer that a region's home views keep alive; weak references to it are possible."""
        return self._find(region, 0, 0).memory

    def address(self, region: Region) -> int:
        """Return the address of a region's home views, on the device as on the host."""
        return self._find(region, 0, 0).address

    def only_launches(self, region: Region) -> bool:
        """Whether `read` and `write` return at once, and the current CUDA stream copies; else they block."""
        return False

    def allocate(self, nbytes: int) -> Region:
        """Reserve `nbytes` > 0 bytes of zeros.

        Raises:
            HomeError: there is not enough room, the home cannot be used, or it is closed.
        """
        if nbytes <= 0:
            raise ValueError(f"a region has at least one byte, not {nbytes}")
        mapped_nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            if self._closed:
                raise HomeError("this home is closed")
            mapping = self._map(mapped_nbytes)
            region = Region(self._next_offset, nbytes)
            self._mappings[region.offset] = mapping
            self._next_offset += mapped_nbytes
        return region

    def tensor(
        self,
        region: Region,
        dtype: torch.dtype,
        shape: Sequence[int],
        stride: Sequence[int],
        offset_nbytes: int,
    ) -> torch.Tensor:
        """Make a home view: a tensor over a region's bytes, valid as long as it lives, even after the home.

        Its storage is its own and spans just its elements, so `torch.save` and `deepcopy` copy no neighbours; home
        views of the same bytes alias, but torch does not know it.

        Args:
            shape, stride: in elements; `stride` is not negative.
            offset_nbytes: where element 0 is in the region, a multiple of the element size.

        Raises:
            ValueError: the bytes are not all in the region, or not aligned to the element size.
        """
        span = home_view_span(dtype, shape, stride, offset_nbytes)
        mapping = self._find(region, offset_nbytes, span * dtype.itemsize)
        if span == 0:
            return torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="cpu")
        flat = torch.frombuffer(mapping.memory, dtype=dtype, count=span, offset=offset_nbytes)
        # Not flat.as_strided: that would be an autograd view, with `flat` as its base.
        view = torch.empty(0, dtype=dtype, device="cpu").set_(flat.untyped_storage(), 0, tuple(shape), tuple(stride))
        if self.is_shared_with_forks:
            refuse_in_forks(view)
        return view

    @abc.abstractmethod
    def read(self, region: Region, offset_nbytes: int, destination: torch.Tensor) -> None:
        """Fill `destination` (contiguous, on the CPU, any dtype) with a region's bytes from `offset_nbytes`.

        Blocks until done, without the GIL. Raises HomeError if the medium fails or the home is closed,
        ValueError if the bytes are not all in the region.
        """

    @abc.abstractmethod
    def read_cast(self, region: Region, dtype: torch.dtype, destination: torch.Tensor) -> None:
        """Fill `destination` (flat, contiguous) with a region's first elements, of `dtype`, cast to its own dtype.

        Blocks until done; otherwise as `read`.
        """

    @abc.abstractmethod
    def write(self, region: Region, offset_nbytes: int, source: torch.Tensor) -> None:
        """Copy `source` into the region at `offset_nbytes`; otherwise as `read`."""

    def forget(self, region: Region) -> bool:
        """Zero a region so that it takes no memory until written; return whether this home can do that."""
        return False

    @property
    def disk_free_nbytes(self) -> int | None:
        """Bytes that are free on the home's disk; None: it is no disk."""
        return None

    def free(self, region: Region) -> None:
        """Free a region, as soon as no home view and no running copy uses it."""
        with self._lock:
            self._mappings.pop(region.offset, None)

    def close(self) -> None:
        """Free all regions, each as soon as no home view and no running copy uses it."""
        with self._lock:
            self._closed = True
            self._mappings.clear()

    @abc.abstractmethod
    def _map(self, nbytes: int) -> Mapping:
        """Map new zeroed memory of `nbytes` bytes, a multiple of the page size. Raises HomeError."""

    def _find(self, region: Region, offset_nbytes: int, nbytes: int) -> Mapping:
        mapping = self._mappings.get(region.offset)
        if mapping is None:
            raise HomeError("this home is closed" if self._closed else f"{region} is not of this home")
        if not 0 <= offset_nbytes <= offset_nbytes + nbytes <= region.nbytes:
            raise ValueError(f"bytes {offset_nbytes} to {offset_nbytes + nbytes} are not all in {region}")
        return mapping


class MemoryHome(Home):
    """Home memory in RAM: anonymous, private maps. After os.fork each process has its own copy."""

    def read(self, region: Region, offset_nbytes: int, destination: torch.Tensor) -> None:
        nbytes = _copied_nbytes(destination)
        mapping = self._find(region, offset_nbytes, nbytes)
        ctypes.memmove(destination.data_ptr(), mapping.address + offset_nbytes, nbytes)

    def read_cast(self, region: Region, dtype: torch.dtype, destination: torch.Tensor) -> None:
        destination.copy_(self.bytes(region)[: destination.numel() * dtype.itemsize].view(dtype))

    def write(self, region: Region, offset_nbytes: int, source: torch.Tensor) -> None:
        nbytes = _copied_nbytes(source)
        mapping = self._find(region, offset_nbytes, nbytes)
        ctypes.memmove(mapping.address + offset_nbytes, source.data_ptr(), nbytes)

    def forget(self, region: Region) -> bool:
        self._find(region, 0, 0).memory.madvise(mmap.MADV_DONTNEED)
        return True

    def _map(self, nbytes: int) -> Mapping:
        return Mapping(map_memory(nbytes), None)


class DiskHome(Home):
    """Home memory in a file without a name: no file is left behind, however the process ends.

    Home views are shared maps of the file, coherent with `read` and `write` through the page cache. A child of
    `os.fork` cannot have a snapshot of them, so they raise there (see `runtime.storage.forks`). Space is reserved at
    `allocate`, so that a full disk is an error there and not a crash at a later access; a file system that copies on
    write may not keep that promise.

    Args:
        directory: where the files are made; the system's temporary directory by default.
        num_under_way: pieces that are read at the same time.
        past_cache: read bytes that are not in the page cache past it, where the file system can.

    Raises:
        HomeError: the directory does not exist, is not a directory, or no file can be made in it.
    """

    is_shared_with_forks = True

    def __init__(
        self, directory: str | None = None, *, num_under_way: int = NUM_UNDER_WAY, past_cache: bool = True
    ) -> None:
        super().__init__()
        if directory is None:
            try:
                directory = tempfile.gettempdir()
            except FileNotFoundError as error:
                raise home_error(f"no directory for a disk home: {error.strerror}", error) from error
        self.directory = os.path.abspath(os.path.expanduser(directory))
        self._past_cache = past_cache
        NamelessFile(self.directory)
        self._readers = Readers(num_under_way)
        self._pages = self._reader_pages(num_under_way)
        self._file: Callable[[], NamelessFile | None] = lambda: None

    def read(self, region: Region, offset_nbytes: int, destination: torch.Tensor) -> None:
        """Read as `Home.read`: several pieces at once, those not in the page cache past it (see `disk_reads`)."""
        nbytes = _copied_nbytes(destination)
        mapping = self._find(region, offset_nbytes, nbytes)
        target = destination.detach().reshape(-1).view(torch.uint8)
        if nbytes < WORTH_A_THREAD_NBYTES:
            self._read_piece(mapping, offset_nbytes, target, self._pages[0], past_cache=False)
            return

        def job_of(index: int) -> Callable[[], None]:
            into = target[index * PIECE_NBYTES : (index + 1) * PIECE_NBYTES]
            pages = self._pages[index % self._readers.num]
            return partial(
                self._read_piece,
                mapping,
                offset_nbytes + index * PIECE_NBYTES,
                into,
                pages,
                past_cache=self._past_cache,
            )

        for _ in self._readers.run(-(-nbytes // PIECE_NBYTES), job_of):
            pass

    def read_cast(self, region: Region, dtype: torch.dtype, destination: torch.Tensor) -> None:
        """Read as `Home.read_cast`, in pieces as `read`."""
        num_elements = PIECE_NBYTES // dtype.itemsize
        mapping = self._find(region, 0, destination.numel() * dtype.itemsize)
        parts = destination.split(num_elements)

        def job_of(index: int) -> Callable[[], None]:
            reader = index % self._readers.num
            return partial(self._cast_piece, mapping, index * PIECE_NBYTES, dtype, self._pages[reader], parts[index])

        for _ in self._readers.run(len(parts), job_of):
            pass

    def write(self, region: Region, offset_nbytes: int, source: torch.Tensor) -> None:
        """Write as `Home.write`: one request at a time, through the page cache."""
        nbytes = _copied_nbytes(source)
        mapping = self._find(region, offset_nbytes, nbytes)
        assert mapping.file is not None
        flat = source.detach().reshape(-1).view(torch.uint8)
        with self._problems("write", nbytes):
            write_through_cache(mapping.file.fd, mapping.offset + offset_nbytes, flat.numpy().data)

    @property
    def disk_free_nbytes(self) -> int:
        try:
            disk = os.statvfs(self.directory)
        except OSError:  # the directory is gone, and its files live on without a name
            return 0
        return disk.f_bavail * disk.f_frsize

    def write_out(self, region: Region, *, forget: bool = False) -> None:
        """Wait until the medium has the file; with `forget`, drop it from the page cache. For measurements.

        Pages that a process has touched through the map stay in the cache.
        """
        file = self._find(region, 0, 0).file
        assert file is not None
        with self._problems("write", region.nbytes):
            os.fsync(file.fd)
            if forget:
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _read_piece(
        self, mapping: Mapping, offset_nbytes: int, into: torch.Tensor, pages: torch.Tensor, *, past_cache: bool
    ) -> None:
        with self._problems("read", into.numel()):
            read_by_way_of(mapping, offset_nbytes, into, pages, past_cache=past_cache)

    def _cast_piece(
        self, mapping: Mapping, offset_nbytes: int, dtype: torch.dtype, pages: torch.Tensor, into: torch.Tensor
    ) -> None:
        """Read elements of the file and cast them, on a reader's thread."""
        nbytes = into.numel() * dtype.itemsize
        with self._problems("read", nbytes):
            piece = read_into_pages(mapping, offset_nbytes, nbytes, pages, past_cache=self._past_cache)
        into.copy_(piece.view(dtype))

    def _reader_pages(self, num: int) -> list[torch.Tensor]:
        """Map memory for each reader, which takes RAM only once it is used."""
        return [torch.frombuffer(map_memory(room_for(PIECE_NBYTES)), dtype=torch.uint8) for _ in range(num)]

    @contextlib.contextmanager
    def _problems(self, verb: str, nbytes: int) -> Iterator[None]:
        """Turn the medium's errors inside into a HomeError."""
        try:
            yield
        except OSError as error:
            target = f"{format_nbytes(nbytes)} of a disk home in {self.directory}"
            raise home_error(f"cannot {verb} {target}: {error.strerror}", error) from error

    def _map(self, nbytes: int) -> Mapping:
        file = self._file() or NamelessFile(self.directory)
        try:
            mapping = file.map(nbytes)
        except OSError as error:
            message = (
                f"cannot reserve {format_nbytes(nbytes)} for a disk home in {self.directory}, where "
                f"{format_nbytes(self.disk_free_nbytes)} are free: {error.strerror}"
            )
            if self._file() is None:
                file.close()  # the traceback would keep it
            raise home_error(message, error) from error
        self._file = weakref.ref(file)
        return mapping


def open_home(spec: str) -> Home:
    """Open the home that an option names: `"cpu"`, `"disk"` (temporary directory) or `"disk:DIR"`.

    Raises:
        OptionsError: the option names no home.
        HomeError: the directory cannot be used.
    """
    kind, colon, directory = spec.partition(":")
    if kind == "cpu" and not colon:
        return MemoryHome()
    if kind == "disk" and bool(colon) == bool(directory):
        return DiskHome(directory or None)
    raise OptionsError(f'home is "cpu", "disk" or "disk:DIR", not {spec!r}')


def home_view_span(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset_nbytes: int) -> int:
    """Count elements from a home view's first to its last. Raises ValueError if they would not be aligned."""
    if offset_nbytes % dtype.itemsize:
        raise ValueError(f"offset {offset_nbytes} is not a multiple of {dtype}'s {dtype.itemsize} bytes")
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _copied_nbytes(tensor: torch.Tensor) -> int:
    assert tensor.device.type == "cpu", "homes copy CPU tensors"
    assert tensor.is_contiguous(), "homes copy contiguous tensors"
    return tensor.numel() * tensor.itemsize
