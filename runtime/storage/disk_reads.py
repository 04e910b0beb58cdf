"""Read a disk home's file: several requests under way at once, past the page cache.

A piece that the cache has is copied from there. Other pieces are read past it (O_DIRECT) into pages of the reader's
own: the kernel need not find, fill and later evict pages of its cache for bytes that are read once per step. Such a
read returns the bytes written before, through the map or by positional writes: the kernel first writes out dirty pages
in its range. A writer of the bytes that are read must be ordered with the read; a writer of neighbouring bytes need not
be, even in the same page.

Writes go through the cache, one at a time. A write past it has to take its range out of the cache, in whole folios; the
kernel gives that up where a neighbour is in use at that moment, and the map would show the old bytes from then on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections import deque
from collections.abc import Callable, Generator

import torch

from chunkc.ir.errors import HomeError, StreamError
from chunkc.runtime.device.streams import JobMark, WorkerStream
from chunkc.runtime.storage.maps import Mapping

NUM_UNDER_WAY = 4
"""Requests under way at once: two are enough for a virtual disk, drives of several GB/s want more."""
PIECE_NBYTES = 4 << 20
"""Bytes of one request."""
WORTH_A_THREAD_NBYTES = 1 << 18
"""Smaller reads run on the calling thread, through the cache: the kernel reads ahead, and neighbours may be next."""
_PAGE = mmap.PAGESIZE


def room_for(piece_nbytes: int) -> int:
    """Count the bytes of whole pages that a piece of a file may touch, wherever it begins."""
    return -(-piece_nbytes // _PAGE) * _PAGE + _PAGE


def _read_through_cache(fd: int, offset: int, into: memoryview) -> None:
    """Fill `into`, by as many calls as it takes. Raises OSError."""
    while into:
        moved_nbytes = os.preadv(fd, [into], offset)
        if moved_nbytes == 0:
            raise OSError(errno.EIO, "the file has ended early")
        into = into[moved_nbytes:]
        offset += moved_nbytes


def write_through_cache(fd: int, offset: int, data: memoryview) -> None:
    """Write all of `data`, by as many calls as it takes. Raises OSError."""
    while data:
        moved_nbytes = os.pwritev(fd, [data], offset)
        if moved_nbytes == 0:
            raise OSError(errno.EIO, "the file takes no more")
        data = data[moved_nbytes:]
        offset += moved_nbytes


def read_into_pages(
    mapping: Mapping, offset_nbytes: int, nbytes: int, pages: torch.Tensor, *, past_cache: bool
) -> torch.Tensor:
    """Read a map's bytes from `offset_nbytes` on from its file; return them as a view of `pages`.

    Args:
        pages: page-aligned, uint8, of `room_for(nbytes)` bytes.
        past_cache: read bytes that are not in the cache past it, where the file system can.

    Raises:
        OSError: the medium fails.
    """
    file, offset = mapping.file, mapping.offset + offset_nbytes
    assert file is not None
    lead = offset % _PAGE
    piece = pages[lead : lead + nbytes]
    if past_cache and file.past_cache_fd is not None and not is_cached(mapping, offset_nbytes, nbytes):
        end = -(-(lead + nbytes) // _PAGE) * _PAGE
        _read_past_cache(file.past_cache_fd, offset - lead, pages[:end].numpy().data)
    else:
        _read_through_cache(file.fd, offset, piece.numpy().data)
    return piece


def read_by_way_of(
    mapping: Mapping, offset_nbytes: int, into: torch.Tensor, pages: torch.Tensor, *, past_cache: bool
) -> None:
    """Fill `into`, flat uint8 anywhere in RAM, from the cache, or past it by way of `pages` (see `read_into_pages`)."""
    file, nbytes = mapping.file, into.numel()
    assert file is not None
    if past_cache and file.past_cache_fd is not None and not is_cached(mapping, offset_nbytes, nbytes):
        piece = read_into_pages(mapping, offset_nbytes, nbytes, pages, past_cache=past_cache)
        ctypes.memmove(into.data_ptr(), piece.data_ptr(), nbytes)
    else:
        _read_through_cache(file.fd, mapping.offset + offset_nbytes, into.numpy().data)


def is_cached(mapping: Mapping, offset_nbytes: int, nbytes: int) -> bool:
    """Whether the page cache has all these bytes of a map of a file. It may lose them at any time."""
    address = mapping.address + offset_nbytes
    begin = address // _PAGE * _PAGE
    num_pages = -(-(address + nbytes - begin) // _PAGE)
    in_cache = ctypes.create_string_buffer(num_pages)
    return not _mincore(begin, num_pages * _PAGE, in_cache) and in_cache.raw.count(1) == num_pages


class Readers:
    """Threads that read pieces at the same time. They start with the first read.

    Args:
        num: number of threads.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self._streams = [WorkerStream(f"disk-reader-{index}") for index in range(num)]

    def run(self, num_jobs: int, job_of: Callable[[int], Callable[[], None]]) -> Generator[int]:
        """Run jobs, as many at a time as there are readers, and yield the index of each that has ended, in order.

        No job is under way when the generator ends, even by an error. Job `index` runs on reader `index % num`, behind
        that reader's earlier jobs.

        Args:
            job_of: makes a job, on the caller's thread, after the caller has processed job `index - num`.

        Raises:
            HomeError, StreamError: a job failed.
        """
        under_way: deque[JobMark] = deque()
        try:
            for index in range(num_jobs):
                if len(under_way) == self.num:
                    under_way[0].wait()
                    under_way.popleft()
                    yield index - self.num
                under_way.append(self._streams[index % self.num].submit(job_of(index)))
            while under_way:
                under_way[0].wait()
                under_way.popleft()
                yield num_jobs - len(under_way) - 1
        finally:
            for mark in under_way:
                _wait_out(mark)


def _wait_out(mark: JobMark) -> None:
    """Wait for a job, and ignore its error: another one is on its way to the caller."""
    with contextlib.suppress(HomeError, StreamError):
        mark.wait()


def _read_past_cache(past_fd: int, offset: int, pages: memoryview) -> None:
    """Fill whole pages from the medium; the kernel first writes out dirty pages of the cache in that range."""
    while pages:
        moved_nbytes = os.preadv(past_fd, [pages], offset) // _PAGE * _PAGE
        if moved_nbytes == 0:
            raise OSError(errno.EIO, "the file has ended early")
        pages = pages[moved_nbytes:]
        offset += moved_nbytes


_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
