"""Measure links, page tables and libraries of the local machine, for `chunkc calibrate` and `bench/gpu_facts.py`.

A call that starts a copy returns a function that waits for its end. So copies on both links are started first and then
waited for: on CUDA without threads, elsewhere on threads that the warm-up has started, since starting a thread inside
a sample would add some 100 us to it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from chunkc.ir.errors import HomeError
from chunkc.ir.hardware import GIB
from chunkc.runtime.device.gpu import Gpu
from chunkc.runtime.storage.homes import DiskHome
from chunkc.runtime.storage.pinned import PinnedHome

MIB = 1 << 20

Start = Callable[[], Callable[[], object]]
"""Starts a copy; returns a function that waits for its end and raises its error."""


@dataclass(frozen=True)
class Sizes:
    """Limits on the bytes moved, the matrices multiplied, and the time.

    Attributes:
        matrix: the largest edge of a square matrix product.
        memory_nbytes: twice the bytes of each of the triad's three arrays, on the compute tier.
        link_nbytes: bytes of a copy over a link, one way.
        update_numel: elements of the parameter in one update on the CPU.
        disk_nbytes: bytes of the temporary file, which is whole chunks of at most 64 MiB.
        repeats: timed repetitions of a measurement at most; at least one is made.
        share_s: seconds after which a measurement stops repeating.
        enough_s: seconds of a product that is long enough to time: matrices stop growing.
        pinned_nbytes: bytes of host memory that are mapped for a GPU when page tables are measured.
    """

    matrix: int = 8192
    memory_nbytes: int = 256 * MIB
    link_nbytes: int = 128 * MIB
    update_numel: int = 16 * MIB
    disk_nbytes: int = 256 * MIB
    repeats: int = 5
    share_s: float = 1.0
    enough_s: float = 0.05
    pinned_nbytes: int = 2 * GIB


def median_s(run: Callable[[], object], sizes: Sizes, *, before: Callable[[], object] = lambda: None) -> float:
    """Return the median seconds of a few runs after a warm-up; at least one is timed.

    Args:
        before: called before each run, and not timed.
    """
    begin = time.perf_counter()
    before()
    run()
    durations: list[float] = []
    while not durations or (len(durations) < sizes.repeats and time.perf_counter() - begin < sizes.share_s):
        before()
        start = time.perf_counter()
        run()
        durations.append(time.perf_counter() - start)
    return max(statistics.median(durations), 1e-9)


def alone_s(start: Start, sizes: Sizes) -> float:
    """Return the median seconds of a copy while the other link is idle."""
    return median_s(lambda: start()(), sizes)


def together_s(first: Start, second: Start, sizes: Sizes) -> float:
    """Return the median seconds until two copies that start together have both ended; raise the error of either."""

    def both() -> None:
        for wait in [start() for start in (first, second)]:
            wait()

    return median_s(both, sizes)


def both_links_bytes_per_s(nbytes: int, first_s: float, second_s: float, both_s: float) -> float:
    """Return the bytes per second of both links together while both are busy.

    This inverts `Hardware.link_seconds`: once one copy is done, the other has its whole link. So the seconds by which
    the slower copy takes longer alone are subtracted.

    Args:
        nbytes: bytes of each of the two copies.
        first_s, second_s: seconds of each copy alone.
        both_s: seconds until both have ended.
    """
    quick_s, slow_s = sorted((first_s, second_s))
    slowdown = min(1.0, quick_s / max(both_s - (slow_s - quick_s), 1e-9))
    return slowdown * (nbytes / first_s + nbytes / second_s)


@contextlib.contextmanager
def disk_copies(folder: str | Path, nbytes: int) -> Iterator[tuple[Start, Start]]:
    """Yield (copy to RAM, copy to home) for a home file, each on a thread of its own that its first copy starts."""
    home = DiskHome(str(folder))
    try:
        regions = [home.allocate(nbytes) for _ in range(2)]
        buffers = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(2)]
        for region, buffer in zip(regions, buffers, strict=True):
            home.write(region, 0, buffer)
        with ThreadPoolExecutor(1) as inward, ThreadPoolExecutor(1) as outward:
            yield (
                lambda: inward.submit(home.read, regions[0], 0, buffers[0]).result,
                lambda: outward.submit(home.write, regions[1], 0, buffers[1]).result,
            )
    finally:
        home.close()


@dataclass(frozen=True)
class CudaCopies:
    """Copies to the device and to home, each on its own stream and between its own buffers.

    Attributes:
        inwards, outwards: start the copy to the device, or to home.
        arrived: whether all bytes have arrived; call it after both copies have ended.
    """

    inwards: Start
    outwards: Start
    arrived: Callable[[], bool]


@contextlib.contextmanager
def cuda_copies(gpu: Gpu, nbytes: int, memory: Literal["home", "pin_memory"] = "home") -> Iterator[CudaCopies]:
    """Make buffers on the device and the host, and yield the copies between them.

    Args:
        nbytes: bytes of each buffer.
        memory: on the host: a home's regions, copied as in training, or tensors that torch pins.
    """
    pattern = torch.arange(251, dtype=torch.uint8, device="cpu").repeat(-(-nbytes // 251))[:nbytes]
    home = PinnedHome(gpu)
    try:
        slots = [gpu.allocate(nbytes, torch.uint8) for _ in range(2)]
        if memory == "home":
            regions = [home.allocate(nbytes) for _ in slots]
            hosts = [home.bytes(region) for region in regions]
            inwards = partial(home.read, regions[0], 0, slots[0])
            outwards = partial(home.write, regions[1], 0, slots[1])
        else:
            hosts = [torch.empty(nbytes, dtype=torch.uint8, device="cpu").pin_memory() for _ in slots]
            inwards = partial(gpu.copy, slots[0], hosts[0])
            outwards = partial(gpu.copy, hosts[1], slots[1])
        hosts[0].copy_(pattern)
        slots[1].copy_(pattern)
        streams = [gpu.new_stream() for _ in slots]
        gpu.current_stream().synchronize()  # slots are filled before another stream reads them

        def start(stream: torch.cuda.Stream, copy: Callable[[], None]) -> Callable[[], object]:
            with gpu.using(stream):
                copy()
            return stream.synchronize

        def arrived() -> bool:
            return torch.equal(slots[0].cpu(), pattern) and torch.equal(hosts[1], pattern)

        yield CudaCopies(partial(start, streams[0], inwards), partial(start, streams[1], outwards), arrived)
        for stream in streams:
            stream.synchronize()
    finally:
        home.close()


def outside_allocator_nbytes(device: torch.device) -> int:
    """Return bytes of device memory in use that torch's allocator has not reserved, other processes' included."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def page_table_nbytes(gpu: Gpu, nbytes: int) -> int:
    """Measure bytes of device memory that page tables take while `nbytes` of host memory are mapped for the device.

    Raises:
        HomeError: the host memory cannot be pinned.
    """
    home = PinnedHome(gpu)
    before_nbytes = outside_allocator_nbytes(gpu.device)
    try:
        home.allocate(nbytes)
        return max(0, outside_allocator_nbytes(gpu.device) - before_nbytes)
    finally:
        home.close()


def page_table_nbytes_per_gib(gpu: Gpu, nbytes: int) -> int | None:
    """Measure bytes of page tables per GiB of mapped host memory; None if `nbytes` cannot be pinned."""
    try:
        return page_table_nbytes(gpu, nbytes) * GIB // nbytes
    except HomeError:
        return None


def train_a_little(device: torch.device) -> None:
    """Run forwards and backwards of a transformer's operators, so that the driver loads libraries and kernels.

    It loads them at their first use, into memory that torch's allocator does not count.
    """
    half = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    for dtype in (torch.float32, half):
        table, weight = (
            torch.full(shape, 0.01, device=device, dtype=dtype, requires_grad=True)
            for shape in ((256, 128), (128, 128))
        )
        bias = torch.zeros(128, device=device, dtype=dtype, requires_grad=True)
        tokens = torch.zeros(2, 128, dtype=torch.int64, device=device)
        x = F.layer_norm(F.embedding(tokens, table), (128,))
        heads = F.linear(x, weight, bias).unflatten(-1, (2, 64)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = x + F.gelu(attended.transpose(1, 2).flatten(2) @ weight)
        loss = F.cross_entropy((x @ table.t()).float().flatten(0, 1), tokens.flatten())
        loss.backward()
    torch.cuda.synchronize(device)
