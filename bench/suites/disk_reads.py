"""Measure how fast a disk home is read: the suite `disk`'s section about the disk alone, without a model.

Each subject is a home of its own over the same disk, that reads as much: one piece or several at a time, through the
page cache or past it. Plain loops are compared with them, in place of `fio`. All take turns, in another order each
round. "Cold" is a home that the page cache has forgotten; "beside writes" is a cold one with another region of the same
file being written meanwhile, as training does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from measuring.context import Context, Progress
from measuring.metrics import Metric, Row, Section, paired_ratios

from chunkc.runtime.storage.disk_reads import NUM_UNDER_WAY, PIECE_NBYTES
from chunkc.runtime.storage.homes import DiskHome

CASE = "reads"
BASE = "a home, 1 at a time, through the cache"
LOOP_NBYTES = 8 << 20
"""Of one request of a plain loop."""


@dataclass(frozen=True)
class Sizes:
    nbytes: int
    chunk_nbytes: int
    num_rounds: int


FULL = Sizes(1 << 30, 64 << 20, num_rounds=7)
SMALL = Sizes(16 << 20, 8 << 20, num_rounds=1)


class Subject:
    """A file of random bytes, and a way to read it."""

    def __init__(self, directory: str, sizes: Sizes, *, num_under_way: int = 1, past_cache: bool = True) -> None:
        self.sizes = sizes
        self.home = DiskHome(directory, num_under_way=num_under_way, past_cache=past_cache)
        self.region, self._other = self.home.allocate(sizes.nbytes), self.home.allocate(sizes.chunk_nbytes)
        self._slot = torch.randint(256, (sizes.chunk_nbytes,), dtype=torch.uint8)
        self._written = self._slot.clone()
        for begin in range(0, sizes.nbytes, sizes.chunk_nbytes):
            self.home.write(self.region, begin, self._slot)
        file = self.home._mappings[self.region.offset].file
        assert file is not None
        self.file = file

    def read(self) -> None:
        for begin in range(0, self.sizes.nbytes, self.sizes.chunk_nbytes):
            self.home.read(self.region, begin, self._slot)

    def write_elsewhere(self) -> None:
        self.home.write(self._other, 0, self._written)

    def forget(self) -> None:
        """Let the page cache forget the file."""
        self.home.write_out(self.region, forget=True)


class Loop(Subject):
    """Read by one request after the other into the same aligned memory."""

    def __init__(self, directory: str, sizes: Sizes, *, past_cache: bool) -> None:
        super().__init__(directory, sizes)
        self._memory = memoryview(mmap.mmap(-1, LOOP_NBYTES))
        self._fd = (self.file.past_cache_fd if past_cache else None) or self.file.fd

    def read(self) -> None:
        for begin in range(0, self.sizes.nbytes, LOOP_NBYTES):
            assert os.preadv(self._fd, [self._memory], begin) == LOOP_NBYTES


def subjects(directory: str, sizes: Sizes) -> dict[str, Subject]:
    """Ways to read, by name."""
    found: dict[str, Subject] = {}
    for num in (1, NUM_UNDER_WAY):
        for past_cache in (False, True):
            way = "past" if past_cache else "through"
            name = f"a home, {num} at a time, {way} the cache"
            found[name] = Subject(directory, sizes, num_under_way=num, past_cache=past_cache)
    found["plain loop, through the cache"] = Loop(directory, sizes, past_cache=False)
    found["plain loop, O_DIRECT"] = Loop(directory, sizes, past_cache=True)
    return found


STATES = ("cold", "cold, beside writes", "in the cache")


def section(context: Context, advance: Progress, directory: str | None = None) -> Section:
    """Measure the disk of the temporary directory, or of another one."""
    sizes = SMALL if context.is_small else FULL
    directory = directory or tempfile.gettempdir()
    ways = subjects(directory, sizes)
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    draw = random.Random(0)
    for _ in range(sizes.num_rounds):
        for state in STATES:
            advance(f"{CASE}: {state}")
            for name in draw.sample(sorted(ways), len(ways)):
                taken.setdefault((state, name), []).append(_turn(ways[name], state))
        if context.is_out_of_time:
            break
    rows = [
        Row({"home is": state, "read by": name}, _metrics(sizes, taken[state, name], taken[state, BASE]))
        for state in STATES
        for name in ways
    ]
    setting = {
        "directory": directory,
        "nbytes": sizes.nbytes,
        "chunk_nbytes": sizes.chunk_nbytes,
        "piece_nbytes": PIECE_NBYTES,
        "num_rounds": sizes.num_rounds,
        "reads past the cache": ways[BASE].file.past_cache_fd is not None,
    }
    return Section("Reads of a disk home", setting, rows)


def _turn(subject: Subject, state: str) -> tuple[float, float]:
    """Wall and processor seconds of one pass over the home; the processor's are without those of concurrent writes."""
    if state == "in the cache":
        for begin in range(0, subject.sizes.nbytes, LOOP_NBYTES):
            os.preadv(subject.file.fd, [bytearray(LOOP_NBYTES)], begin)
    else:
        subject.forget()
    writer = _writing(subject.write_elsewhere) if state == "cold, beside writes" else contextlib.nullcontext()
    with writer:
        begun_s, used_s = time.perf_counter(), time.process_time()
        subject.read()
        return time.perf_counter() - begun_s, time.process_time() - used_s


@contextlib.contextmanager
def _writing(write: Callable[[], None]) -> Iterator[None]:
    """Write, over and over, on another thread."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            write()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _metrics(sizes: Sizes, turns: list[tuple[float, float]], base: list[tuple[float, float]]) -> Mapping[str, Metric]:
    return {
        "read": Metric("nbytes_per_s", tuple(sizes.nbytes / wall_s for wall_s, _ in turns)),
        "time to 1 at a time": paired_ratios([[wall_s] for wall_s, _ in turns], [[wall_s] for wall_s, _ in base]),
        "processors": Metric("s", tuple(used_s for _, used_s in turns)),
    }
