"""Measures links, page tables and libraries of the machine at hand: for `chunkc calibrate` and `bench/gpu_facts.py`.

A copy is begun by a call that returns what waits for its end. So both links are begun one behind the other and then
waited for, on CUDA without a thread, elsewhere by threads that are there before a sample begins: a thread that starts
inside a sample is some 100 us of it.
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
"""Begins a copy; what it returns waits for the end, and raises what went wrong."""


@dataclass(frozen=True)
class Sizes:
    """Limits on the bytes moved, the matrices multiplied, and the time.

    Attributes:
        matrix: the largest edge of a square matrix product.
        memory_nbytes: of each of a copy's two buffers, on the compute tier.
        link_nbytes: of a copy over a link, one way.
        update_numel: parameters of one update on the CPU.
        disk_nbytes: of the temporary file.
        repeats: repetitions of a measurement at most; at least one is made.
        share_s: seconds after which a measurement stops repeating.
        enough_s: a repetition this long is timed well; sizes stop growing.
        pinned_nbytes: host memory that is mapped for a GPU to see what its page tables take.
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
    """Median seconds of a few runs, after one that does not count; at least one counts.

    Args:
        before: made ready by this each time, which does not count.
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
    """Median seconds of a copy while the other link rests."""
    return median_s(lambda: start()(), sizes)


def together_s(first: Start, second: Start, sizes: Sizes) -> float:
    """Median seconds of two copies that begin at once, until both have ended; an error of either is raised."""

    def both() -> None:
        for wait in [start() for start in (first, second)]:
            wait()

    return median_s(both, sizes)


def both_links_bytes_per_s(nbytes: int, first_s: float, second_s: float, both_s: float) -> float:
    """Bytes per second of both links while both run.

    The inverse of `Hardware.link_seconds`: when one copy is done, the other has all of its link. So the seconds by
    which the slower one takes longer alone are not counted.

    Args:
        nbytes: of each of the two copies.
        first_s, second_s: seconds of each alone.
        both_s: seconds until both have ended.
    """
    quick_s, slow_s = sorted((first_s, second_s))
    slowdown = min(1.0, quick_s / max(both_s - (slow_s - quick_s), 1e-9))
    return slowdown * (nbytes / first_s + nbytes / second_s)


@contextlib.contextmanager
def disk_copies(folder: str | Path, nbytes: int) -> Iterator[tuple[Start, Start]]:
    """(copy to RAM, copy to home) between RAM and a home file, each by a thread of its own that is there already."""
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
    """Copies to the device and home, on streams of their own, between buffers of their own.

    Attributes:
        arrived: whether all bytes have arrived, where both copies were made.
    """

    inwards: Start
    outwards: Start
    arrived: Callable[[], bool]


@contextlib.contextmanager
def cuda_copies(gpu: Gpu, nbytes: int, memory: Literal["home", "pin_memory"] = "home") -> Iterator[CudaCopies]:
    """Make buffers on both sides.

    Args:
        memory: a home's regions, copied as training does it, or what torch's pinning gives.
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
    """Device memory in use beyond what torch's allocator reserved; other processes' memory counts, too."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def page_table_nbytes(gpu: Gpu, nbytes: int) -> int:
    """Measure the device memory that page tables take while so much host memory is mapped for the device.

    Raises:
        HomeError: so much host memory cannot be pinned.
    """
    home = PinnedHome(gpu)
    before_nbytes = outside_allocator_nbytes(gpu.device)
    try:
        home.allocate(nbytes)
        return max(0, outside_allocator_nbytes(gpu.device) - before_nbytes)
    finally:
        home.close()


def page_table_nbytes_per_gib(gpu: Gpu, nbytes: int) -> int | None:
    """Measure page tables per GiB of mapped host memory; None where so much cannot be pinned."""
    try:
        return page_table_nbytes(gpu, nbytes) * GIB // nbytes
    except HomeError:
        return None


def train_a_little(device: torch.device) -> None:
    """Run forwards and backwards of a transformer's operators, so that the driver loads libraries and kernels.

    They are loaded when they are first used, into memory that no allocator of torch's counts.
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
