"""Map memory for homes: RAM, or ranges of one file without a name.

A range of a file costs no descriptor of its own: a model may have thousands. When the last tensor over it is gone, the
range is unmapped and its bytes are taken out of the file, so the disk has them again. Its pages are in the page cache,
which counts as the process's memory for as long as they are mapped: `drop_pages` drops them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from chunkc.ir.errors import HomeError
from chunkc.ir.strides import span_of
from chunkc.ir.units import format_nbytes

_WORTH_A_LOOK_NBYTES = 1 << 18
"""Smaller tensors are not worth reading the list of the process's maps."""


class Mapping:
    """Memory of one region, with the file behind it, from `offset` on, if there is one."""

    def __init__(self, memory: Any, file: NamelessFile | None = None, offset: int = 0) -> None:
        self.memory = memory
        self.address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self.file = file
        self.offset = offset


class NamelessFile:
    """Growing file without a name; closed with the last reference to this object, so never under a running copy.

    Args:
        directory: where it is made.

    Attributes:
        past_cache_fd: another descriptor, for reads past the page cache; None where the file system cannot.

    Raises:
        HomeError: the directory does not exist, is not a directory, or no file can be made in it.
    """

    def __init__(self, directory: str) -> None:
        self.fd = _open_nameless(directory)
        self.past_cache_fd = open_past_cache(self.fd)
        self.close = weakref.finalize(self, _close, self.fd, self.past_cache_fd)
        self.close.atexit = False  # a daemon thread may still be copying then
        self._end_nbytes = 0

    def map(self, nbytes: int) -> Mapping:
        """Map `nbytes` new bytes of the file, zeros, reserved on the disk.

        Args:
            nbytes: a multiple of the page size.

        Raises:
            OSError: there is no room; the file is as it was.
        """
        offset = self._end_nbytes
        try:
            os.posix_fallocate(self.fd, offset, nbytes)
            address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, self.fd, offset)
            if address == _MAP_FAILED:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        except OSError:
            os.ftruncate(self.fd, offset)  # a part may have been reserved
            raise
        memory = (ctypes.c_char * nbytes).from_address(address)
        _live[address] = nbytes, self.fd, offset
        weakref.finalize(memory, _unmap, address, nbytes, self, os.getpid()).atexit = False
        self._end_nbytes += nbytes
        return Mapping(memory, self, offset)


def open_past_cache(fd: int) -> int | None:
    """Open another descriptor of a file, for reads of whole pages past the page cache.

    Returns:
        None where the file system does not say that this is possible (`statx`, Linux 6.1 or newer).
    """
    if not _reads_pages_directly(fd):
        return None
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


def _reads_pages_directly(fd: int) -> bool:
    """Whether the file system says that it reads this file past the cache, in pages and into pages."""
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:
        return False
    buffer = (ctypes.c_uint32 * 64)()
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) or not buffer[0] & _STATX_DIOALIGN:
        return False
    memory, offset = buffer[38], buffer[39]  # stx_dio_mem_align, stx_dio_offset_align: 0 where it cannot be done
    return memory > 0 and offset > 0 and mmap.PAGESIZE % memory == 0 and mmap.PAGESIZE % offset == 0


_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000


def _close(*fds: int | None) -> None:
    for fd in fds:
        if fd is not None:
            os.close(fd)


_live: dict[int, tuple[int, int, int]] = {}
"""Address of every map of a file -> bytes, descriptor, offset. Finalizers pop from it, in any thread."""


def _unmap(address: int, nbytes: int, file: NamelessFile, pid: int) -> None:
    """Unmap a range after its last user. In a child of `os.fork`, the parent may still use the file's bytes."""
    _live.pop(address, None)
    if os.getpid() == pid:
        _libc.madvise(
            address, nbytes, _MADV_REMOVE
        )  # not every file system can: the bytes then stay until the file is closed
    _libc.munmap(address, nbytes)


def drop_pages(tensor: torch.Tensor) -> None:
    """Drop the RAM behind a tensor over a disk home; its bytes stay in the file. Does nothing for other tensors."""
    if tensor.device.type == "cpu" and tensor.numel():
        begin, end = span_of(tensor)
        drop_span(begin, end - begin)


def drop_span(address: int, nbytes: int) -> None:
    """Drop the RAM behind bytes from an address on, as `drop_pages`, up to the end of the map with this address."""
    for first, (size, *_) in list(_live.items()):
        if first <= address < first + size:
            begin = address // mmap.PAGESIZE * mmap.PAGESIZE
            _libc.madvise(begin, min(address + nbytes, first + size) - begin, mmap.MADV_DONTNEED)
            return


def evict_pages(tensor: torch.Tensor) -> None:
    """Let the kernel take the RAM behind a tensor that a library mapped from a file. Does nothing for other tensors.

    The contents stay valid, also those between the tensor's rows: pages are read again if needed. The kernel declines
    if the process may not write the file.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < _WORTH_A_LOOK_NBYTES:
        return
    first, last = span_of(tensor)
    begin, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    found = map_at(begin)
    if found is not None and found.is_of_a_file and end <= found.end:
        _libc.madvise(begin, end - begin, _MADV_PAGEOUT)


@dataclass(frozen=True)
class KernelMap:
    """A map of this process, as the system lists it.

    Attributes:
        end: the address behind its last byte.
        is_shared: other processes may map the same memory, or what is written goes to a file.
        is_of_a_file: of one that has a name.
    """

    end: int
    is_shared: bool
    is_of_a_file: bool


def map_at(address: int) -> KernelMap | None:
    """Return the map that an address lies in; None where the system does not say."""
    with suppress(OSError), open("/proc/self/maps", errors="surrogateescape") as maps:
        for line in maps:
            span, permissions, _, _, inode, *path = line.split(maxsplit=5)
            begin, end = (int(bound, 16) for bound in span.split("-"))
            if begin <= address < end:
                has_name = inode != "0" and path[0].startswith("/") and "(deleted)" not in path[0]
                return KernelMap(end, permissions.endswith("s"), has_name)
    return None


def make_private_in_child() -> None:
    """Make every shared map of a file private at its address, in a child of `os.fork`: code may have the address."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    for address, (nbytes, fd, offset) in _live.items():
        if _libc.mmap(address, nbytes, protection, flags, fd, offset) != address:
            os._exit(1)  # never with the parent's memory at hand
    _live.clear()


def map_memory(nbytes: int) -> mmap.mmap:
    """Map anonymous, private memory, zeroed. Raises HomeError."""
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        message = f"cannot map {format_nbytes(nbytes)} of memory as a home: {error.strerror}"
        raise home_error(message, error) from error


# Errors by which kernels and file systems refuse O_TMPFILE.
_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


def _open_nameless(directory: str) -> int:
    """Open a new empty file in `directory` that has no name, or lost it at once; return its descriptor."""
    try:
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in _NO_NAMELESS_FILES:
                raise
        fd, path = tempfile.mkstemp(prefix="chunkc-", dir=directory)
        os.unlink(path)
        return fd
    except OSError as error:
        if not os.path.exists(directory):
            problem = "it does not exist"
        elif not os.path.isdir(directory):
            problem = "it is not a directory"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            problem = f"it is not writable ({error.strerror})"
        else:
            problem = str(error.strerror)
        raise home_error(f"cannot make a home in the directory {directory}: {problem}", error) from error


def home_error(message: str, cause: OSError) -> HomeError:
    """Make a HomeError with the cause's errno."""
    error = HomeError(message)
    error.errno = cause.errno
    return error


_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_MADV_REMOVE, _MADV_PAGEOUT = 9, 21
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
