"""Measure the local machine, in under half a minute, as a `Hardware` to plan with.

Each figure is the median of a few repetitions after a warm-up, within a limit of seconds. Matrices grow until a product
is long enough to time or their largest size is reached. The links depend on the compute tier:

- CPU: between RAM and a home file, through `chunkc.runtime.storage.homes` and the page cache, as in training;
- CUDA: between the device and a home's pinned regions, on streams, as in training.

On CUDA also: device memory that the driver takes outside of torch's allocator once the libraries and kernels of a
training step are loaded, and bytes of its page tables for each GiB of host memory that is mapped for the device.

The disk's rates are measured separately, as a disk home writes and reads it, past the page cache as far as a user
without privileges can: writes end with `fsync`, reads follow `posix_fadvise(DONTNEED)`. A file system with a cache of
its own, or in RAM (tmpfs), still answers from memory. Run this on a machine that is otherwise idle.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from chunkc.ir.errors import ChunkcError, HomeError, UnsupportedError
from chunkc.ir.hardware import Hardware
from chunkc.ir.links import host_links
from chunkc.ir.states import FLOAT32, StateFormat
from chunkc.ir.updates import update_traffic
from chunkc.kernels.elementwise_cpu import prepare
from chunkc.kernels.formats import AdamFormat
from chunkc.kernels.hyperparameters import AdamHyper
from chunkc.machines.host import compute_tier_memory
from chunkc.machines.measuring import (
    MIB,
    Sizes,
    Start,
    alone_s,
    both_links_bytes_per_s,
    cuda_copies,
    disk_copies,
    median_s,
    outside_allocator_nbytes,
    page_table_nbytes_per_gib,
    together_s,
    train_a_little,
)
from chunkc.runtime.device.gpu import TorchGpu
from chunkc.runtime.storage.homes import DiskHome

__all__ = ["Sizes", "calibrate"]

Show = Callable[[str, int, int], None]
"""Called as `show(what, done, of)`: the measurement that begins, the number of those done, and of all."""

_UPDATED = StateFormat(master=FLOAT32)
"""States of the bf16 parameters in the timed update, by which `update_traffic` counts its bytes."""


def calibrate(
    *,
    device: torch.device | str | None = None,
    directory: Path | str | None = None,
    sizes: Sizes | None = None,
    show: Show | None = None,
) -> Hardware:
    """Measure one device, its links, the CPU's updates and a disk.

    Args:
        device: "cpu" or a CUDA device; None: the current CUDA device where there is one.
        directory: where disk homes would be; None: the temporary directory. Needs room for `sizes.disk_nbytes`, in
            whole chunks of 64 MiB, and on a CPU for twice `sizes.link_nbytes`; not for both at once.
        sizes: smaller ones are quicker and less exact.
        show: called before each measurement and after the last.

    Returns:
        The machine with one such device, even if it has several. Rates are those of this process's threads.

    Raises:
        UnsupportedError: the device is neither a CPU nor an available CUDA device, or updates cannot be compiled.
        ChunkcError: the directory cannot be used.
    """
    sizes = sizes or Sizes()
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type not in ("cpu", "cuda") or (where.type == "cuda" and not torch.cuda.is_available()):
        raise UnsupportedError(f"cannot measure {str(where)!r}: give 'cpu', or 'cuda' on a machine with a CUDA device")
    folder = str(directory or tempfile.gettempdir())
    total_nbytes, _ = compute_tier_memory()
    names = _matrix_names(where)
    is_cuda = where.type == "cuda"
    progress = _Progress(show, len(names) + (8 if is_cuda else 6))

    rates: dict[str, float] = {}
    for name, dtype in names.items():
        with progress(f"matrix products, {name}"), _tf32(name == "tf32"):
            rates[name] = _matrix_flops_per_s(where, dtype, sizes)
    with progress("memory"):
        memory = _memory_bytes_per_s(where, sizes)
    context, page_tables = 0, None
    if is_cuda:
        with progress("libraries on the device"):
            train_a_little(where)
            context = outside_allocator_nbytes(where)
        with progress("page tables"):
            page_tables = page_table_nbytes_per_gib(TorchGpu(where.index), _mappable_nbytes(sizes))
    with _copies(where, folder, sizes) as (inwards, outwards):
        with progress("link to the device"):
            inwards_s = alone_s(inwards, sizes)
        with progress("link to home"):
            outwards_s = alone_s(outwards, sizes)
        with progress("both links"):
            both_s = together_s(inwards, outwards, sizes)
    to_device, to_home = (sizes.link_nbytes / seconds for seconds in (inwards_s, outwards_s))
    with progress("updates on the CPU"):
        update = _update_bytes_per_s(sizes)
    with progress("disk"):
        disk_write, disk_read = _disk_bytes_per_s(folder, sizes)
    progress.finish()

    return Hardware(
        name=torch.cuda.get_device_name(where) if is_cuda else "this machine's CPU",
        kind="cuda" if is_cuda else "cpu",
        flops_per_s=max(rates[name] for name in ("bf16", "fp16")) if is_cuda else rates["fp32"],
        memory_bytes_per_s=memory,
        links=host_links(to_device, to_home, from_disk=disk_read, to_disk=disk_write),
        both_links_bytes_per_s=both_links_bytes_per_s(sizes.link_nbytes, inwards_s, outwards_s, both_s),
        device_memory_nbytes=torch.cuda.mem_get_info(where)[1] if is_cuda else total_nbytes,
        context_nbytes=context,
        page_table_nbytes_per_gib=page_tables,
        fp32_flops_per_s=rates["fp32"],
        tf32_flops_per_s=rates.get("tf32"),
        bf16_flops_per_s=rates["bf16"],
        fp16_flops_per_s=rates["fp16"],
        host_memory_nbytes=total_nbytes,
        cpu_update_bytes_per_s=update,
        capability=torch.cuda.get_device_capability(where) if is_cuda else None,
        source=f"measured by chunkc calibrate with {torch.get_num_threads()} CPU threads, torch {torch.__version__}",
    )


class _Progress:
    """Calls `show` as each measurement begins, and at the end."""

    def __init__(self, show: Show | None, of: int) -> None:
        self._show, self._done, self._of = show, 0, of

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        self._tell(what)
        yield
        self._done += 1

    def finish(self) -> None:
        assert self._done == self._of, f"{self._done} measurements, announced {self._of}"
        self._tell("done")

    def _tell(self, what: str) -> None:
        if self._show is not None:
            self._show(what, self._done, self._of)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matrix_names(device: torch.device) -> dict[str, torch.dtype]:
    """Return name of each rate to measure -> dtype of its matrices."""
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    has_tf32 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return names | ({"tf32": torch.float32} if has_tf32 else {})


@contextlib.contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    """Set whether fp32 products on CUDA round to tf32; restore the user's setting afterwards."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if wanted else "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


@torch.no_grad()
def _matrix_flops_per_s(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> float:
    """Measure operations per second of a square product; its edge doubles until the product takes long enough."""
    edge = min(256, sizes.matrix)
    while True:
        a, b = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
        out = torch.empty(edge, edge, device=device, dtype=dtype)

        def product(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> None:
            torch.mm(a, b, out=out)
            _synchronize(device)

        product()
        start = time.perf_counter()
        product()
        if time.perf_counter() - start >= sizes.enough_s or 2 * edge > sizes.matrix:
            return 2 * edge**3 / median_s(product, sizes)
        edge *= 2


@torch.no_grad()
def _memory_bytes_per_s(device: torch.device, sizes: Sizes) -> float:
    """Measure bytes read and written per second by STREAM's triad, a = b + s * c, in fp32 (McCalpin, 1995)."""
    a, b, c = (torch.ones(sizes.memory_nbytes // 8, device=device) for _ in range(3))

    def triad() -> None:
        torch.add(b, c, alpha=0.5, out=a)
        _synchronize(device)

    return 3 * a.nbytes / median_s(triad, sizes)


@contextlib.contextmanager
def _copies(device: torch.device, folder: str, sizes: Sizes) -> Iterator[tuple[Start, Start]]:
    """Yield (copy to the device, copy to home), as training makes them."""
    if device.type == "cuda":
        with cuda_copies(TorchGpu(device.index), sizes.link_nbytes) as found:
            yield found.inwards, found.outwards
    else:
        with disk_copies(folder, sizes.link_nbytes) as found:
            yield found


@torch.no_grad()
def _update_bytes_per_s(sizes: Sizes) -> float:
    """Measure bytes of memory traffic per second of AdamW on bf16 parameters with fp32 states."""
    numel = sizes.update_numel
    update = prepare(AdamFormat(torch.bfloat16, torch.bfloat16, master=True), AdamHyper(lr=1e-3, step=1))
    param, grad = (torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2))
    exp_avg, exp_avg_sq, master = (torch.zeros(numel) for _ in range(3))
    seconds = median_s(lambda: update([param, grad, exp_avg, exp_avg_sq, master]), sizes)
    return sum(stage.nbytes for stage in update_traffic(torch.bfloat16, _UPDATED, numel)) / seconds


def _mappable_nbytes(sizes: Sizes) -> int:
    """Return bytes of host memory to map when page tables are measured: at most an eighth of those available."""
    _, available_nbytes = compute_tier_memory()
    return max(mmap.PAGESIZE, min(sizes.pinned_nbytes, available_nbytes // 8))


def _disk_bytes_per_s(folder: str, sizes: Sizes) -> tuple[float, float]:
    """Measure (write, read) bytes per second of the drive behind `folder`, as a disk home writes and reads it."""
    chunk = torch.randint(256, (64 * MIB,), dtype=torch.uint8)[: sizes.disk_nbytes]  # random: some drives compress
    num_chunks = max(1, math.ceil(sizes.disk_nbytes / len(chunk)))
    try:
        home = DiskHome(folder)
        try:
            region = home.allocate(num_chunks * len(chunk))

            def write() -> None:
                for index in range(num_chunks):
                    home.write(region, index * len(chunk), chunk)
                home.write_out(region)

            def read() -> None:
                for index in range(num_chunks):
                    home.read(region, index * len(chunk), chunk)

            write_s = median_s(write, sizes)
            read_s = median_s(read, sizes, before=lambda: home.write_out(region, forget=True))
            return region.nbytes / write_s, region.nbytes / read_s
        finally:
            home.close()
    except HomeError as error:
        raise ChunkcError(f"cannot measure the disk behind {folder!r}: {error}; name another one") from error
