"""What a CUDA device and its driver do, as far as chunkc takes it for granted. Each function runs in its own process.

Values are compared wherever bytes move or kernels compute. Rates are medians of a few runs.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pynvml
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_leaves

from chunkc.ir.hardware import GIB
from chunkc.kernels.elementwise_triton import launchable
from chunkc.machines.devices import TABLES_NBYTES, hardware_of, overhead_of
from chunkc.machines.host import compute_tier_memory
from chunkc.machines.measuring import (
    MIB,
    Sizes,
    alone_s,
    both_links_bytes_per_s,
    cuda_copies,
    median_s,
    outside_allocator_nbytes,
    together_s,
    train_a_little,
)
from chunkc.passes.graphs.attention_cuda import attention_kernel, may_take_cudnn
from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.passes.memory.scratch.cuda import cuda_output_nbytes, cuda_scratch_nbytes
from chunkc.runtime.device.cuda import memory_limit
from chunkc.runtime.device.gpu import TorchGpu, driver_attribute, has_kernels_for
from chunkc.runtime.storage.homes import MemoryHome
from chunkc.runtime.storage.pinned import PinnedHome, on_device
from chunkc.torch_private.cuda_allocator import use_expandable_segments
from gpu.attention_calls import attention as attention_call
from gpu.attention_calls import taken_nbytes
from gpu.fact_processes import Fact, info, judged
from gpu.process_memory import process_nbytes


@dataclass(frozen=True)
class Size:
    """How much the facts move.

    Attributes:
        sizes: of copies over links, and how often things are repeated.
        view_numel: float32 elements of a home view.
        triton_numel: of those that the Triton kernel gets.
        unit_nbytes: what stands for 1 GiB where memory is registered.
        attention_shapes: batch, heads, rows, width.
        bits_rows: rows of the attention whose backward is repeated.
        block_nbytes: of the smallest block that expandable segments are tried with.
    """

    sizes: Sizes
    view_numel: int
    triton_numel: int
    unit_nbytes: int
    attention_shapes: tuple[tuple[int, int, int, int], ...]
    bits_rows: int
    block_nbytes: int


FULL = Size(
    sizes=Sizes(link_nbytes=256 * MIB, repeats=5, share_s=0.5),
    view_numel=64 * MIB,
    triton_numel=64 * MIB,
    unit_nbytes=GIB,
    attention_shapes=((4, 8, 512, 64), (1, 32, 2048, 128)),
    bits_rows=1024,
    block_nbytes=128 * MIB,
)
SMALL = replace(
    FULL,
    sizes=Sizes(matrix=256, link_nbytes=MIB, repeats=2, share_s=0.1),
    view_numel=MIB // 4,
    triton_numel=1000,
    unit_nbytes=8 * MIB,
    attention_shapes=((2, 2, 256, 64),),
    bits_rows=256,
    block_nbytes=40 * MIB,
)

ATTRIBUTES = {
    "unified_addressing": 41,
    "can_map_host_memory": 19,
    "host_register_supported": 99,
    "can_use_host_pointer": 91,
    "pageable_memory_access": 88,
    "pageable_memory_access_uses_host_page_tables": 100,
    "concurrent_managed_access": 89,
    "virtual_memory_management": 102,
    "async_engine_count": 40,
    "multiprocessor_count": 16,
}
"""Numbers of `CUdevice_attribute` (cuda.h)."""


def device(size: Size) -> Iterator[Fact]:
    """The device, what the driver says of it, and whether homes can be on it."""
    nvml = _nvml()
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        yield judged(nvml is None, "device", "the driver has a GPU, and torch cannot use it", num_devices=0)
        return
    index = torch.cuda.current_device()
    found = torch.cuda.get_device_properties(index)
    capability, built_for = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    yield judged(
        has_kernels_for(capability, built_for),
        "device",
        f"this torch has kernels for {', '.join(built_for)}",
        device=found.name,
        num_devices=torch.cuda.device_count(),
        capability=f"{capability[0]}.{capability[1]}",
        memory_nbytes=found.total_memory,
        cudnn=torch.backends.cudnn.version(),
        cuda=torch.version.cuda,
        numa_node=TorchGpu().numa_node(),
        **(nvml or {}),
    )
    attributes = {name: driver_attribute(index, number) for name, number in ATTRIBUTES.items()}
    needed = ("unified_addressing", "can_map_host_memory", "can_use_host_pointer")
    missing = [name for name in needed if attributes[name] == 0]
    yield judged(not missing, "attributes", f"homes need {', '.join(missing)}", **attributes)
    links = hardware_of(torch.device("cuda", index))
    yield info("planned-with", hardware=links.name, source=links.source, context_nbytes=links.context_nbytes)


def _nvml() -> dict[str, Any] | None:
    """What the driver's library for management says of the first GPU; None where there is none."""
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    except pynvml.NVMLError:
        return None
    asked: dict[str, Callable[[], Any]] = {
        "driver": pynvml.nvmlSystemGetDriverVersion,
        "link_generation": lambda: pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        "link_width": lambda: pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        "persistence_mode": lambda: pynvml.nvmlDeviceGetPersistenceMode(handle),
    }
    found = {}
    for name, ask in asked.items():
        try:
            found[name] = ask()
        except (pynvml.NVMLError, AttributeError):  # not every driver, nor every stand-in for one, tells
            found[name] = "unknown"
    return found


class _HomeView:
    """A region of a home of its own, with numbers in it: as the host's tensor, and as the device's view."""

    def __init__(self, numel: int) -> None:
        self.gpu = TorchGpu()
        self.home = PinnedHome(self.gpu)
        region = self.home.allocate(4 * numel)
        self.host = self.home.bytes(region).view(torch.float32)
        self.host.copy_(pattern(numel))
        self.view = self.home.tensor(region, torch.float32, (numel,), (1,), 0)


def pattern(numel: int, begin: int = 0) -> Tensor:
    """Whole numbers, exact in float32, on the CPU."""
    return torch.arange(begin, begin + numel, dtype=torch.int32, device="cpu").remainder_(1009).float()


def _gb_per_s(nbytes: int, run: Callable[[], object], size: Size) -> float:
    def and_wait() -> None:
        run()
        torch.cuda.synchronize()

    return nbytes / median_s(and_wait, size.sizes) / 1e9


def view_read(size: Size) -> Iterator[Fact]:
    """A kernel reads a home view."""
    home = _HomeView(size.view_numel)
    out = torch.empty(size.view_numel, device="cuda")
    rate = _gb_per_s(out.nbytes, lambda: torch.add(home.view, 1.0, out=out), size)
    holds = torch.equal(out.cpu(), pattern(size.view_numel) + 1)
    yield judged(holds, "view-read", "a kernel read other numbers than the host wrote", gb_per_s=rate)


def view_write(size: Size) -> Iterator[Fact]:
    """A kernel writes a home view."""
    home = _HomeView(size.view_numel)
    source = pattern(size.view_numel, 7).to("cuda")
    rate = _gb_per_s(source.nbytes, lambda: torch.add(source, 1.0, out=home.view), size)
    holds = torch.equal(home.host, pattern(size.view_numel, 7) + 1)
    yield judged(holds, "view-write", "the host read other numbers than a kernel wrote", gb_per_s=rate)


def view_copies(size: Size, which: str) -> Iterator[Fact]:
    """`copy_` in one direction, or `zero_`, on a home view, as eager code calls it."""
    numel = size.view_numel
    home, others = _HomeView(numel), pattern(numel, 7)
    expected, read = others, home.host
    if which == "to device":
        target = torch.empty(numel, device="cuda")
        run: Callable[[], object] = lambda: target.copy_(home.view)  # noqa: E731
        expected, read = pattern(numel), target
    elif which == "from device":
        source = others.to("cuda")
        run = lambda: home.view.copy_(source)  # noqa: E731
    elif which == "to host":
        target = torch.empty(numel, device="cpu")
        run = lambda: target.copy_(home.view)  # noqa: E731
        expected, read = pattern(numel), target
    elif which == "from host":
        run = lambda: home.view.copy_(others)  # noqa: E731
    elif which == "to view":
        second = _HomeView(numel)
        run = lambda: second.view.copy_(home.view)  # noqa: E731
        second.host.zero_()
        expected, read = pattern(numel), second.host
    else:
        run = home.view.zero_
        expected = torch.zeros(numel, device="cpu")
    rate = _gb_per_s(home.view.nbytes, run, size)
    name = f"view-{which.replace(' ', '-')}"
    yield judged(torch.equal(read.cpu(), expected), name, "other numbers arrived", gb_per_s=rate)


def view_triton(size: Size) -> Iterator[Fact]:
    """A Triton kernel adds one to a home view in place."""
    numel = size.triton_numel
    home = _HomeView(numel)
    begin_s = time.perf_counter()
    _add_one(home.view)
    first_s = time.perf_counter() - begin_s
    holds = torch.equal(home.host, pattern(numel) + 1)
    rate = _gb_per_s(2 * home.view.nbytes, lambda: _add_one(home.view), size)
    yield judged(holds, "view-triton", "the host read other numbers", both_ways_gb_per_s=rate, compile_s=first_s)


def _add_one(values: Tensor) -> None:
    """Add one by a kernel of Triton's, launched as those of updates are."""
    one_kernel = importlib.import_module("gpu.one_kernel")  # needs Triton
    one_kernel.add_one(values, launchable(values))
    torch.cuda.synchronize()


def copies(size: Size, memory: Literal["home", "pin_memory"]) -> Iterator[Fact]:
    """Copies up, down and both at once."""
    nbytes = size.sizes.link_nbytes
    with cuda_copies(TorchGpu(), nbytes, memory) as found:
        inwards_s, outwards_s = (alone_s(start, size.sizes) for start in (found.inwards, found.outwards))
        both_s = together_s(found.inwards, found.outwards, size.sizes)
        holds = found.arrived()
    yield judged(
        holds,
        f"copies-{memory.replace('_', '-')}",
        "other bytes arrived",
        to_device_gb_per_s=nbytes / inwards_s / 1e9,
        to_home_gb_per_s=nbytes / outwards_s / 1e9,
        both_gb_per_s=2 * nbytes / both_s / 1e9,
        both_as_planned_gb_per_s=both_links_bytes_per_s(nbytes, inwards_s, outwards_s, both_s) / 1e9,
        nbytes=nbytes,
    )


def register(size: Size, num_gib: int) -> Iterator[Fact]:
    """Map and pin host memory: seconds, what page tables take, what kind of pages there are; it stays pinned."""
    nbytes = num_gib * size.unit_nbytes
    name = f"register-{num_gib}"
    _, available_nbytes = compute_tier_memory()
    if available_nbytes < nbytes + 2 * size.unit_nbytes:
        yield info(name, f"only {available_nbytes:,} bytes of host memory are available")
        return
    gpu = TorchGpu()
    torch.ones(1, device="cuda")
    before, nvml_before = outside_allocator_nbytes(gpu.device), _nvml_used_nbytes()
    home = PinnedHome(gpu)
    begin_s = time.perf_counter()
    region = home.allocate(nbytes)
    register_s = time.perf_counter() - begin_s
    tables = outside_allocator_nbytes(gpu.device) - before
    nvml_after = _nvml_used_nbytes()
    pages = _huge_nbytes(home.address(region))
    view = home.tensor(region, torch.uint8, (nbytes,), (1,), 0)
    view[-1] = 5
    torch.cuda.synchronize()
    holds = int(home.bytes(region)[-1]) == 5
    yield judged(
        holds,
        name,
        "what the device wrote to the last byte is not there",
        nbytes=nbytes,
        s_per_gib=register_s / nbytes * GIB,
        page_table_nbytes=tables,
        page_table_nbytes_per_gib=tables * GIB // nbytes,
        nvml_nbytes=None if nvml_before is None or nvml_after is None else nvml_after - nvml_before,
        huge_share=None if pages is None else pages / nbytes,
    )
    if num_gib > 1:  # stays pinned: the end of the process gives it back
        _kept.append(home)
        return
    begin_s = time.perf_counter()
    del view
    home.close()
    left_nbytes = home.pinned_nbytes  # waits for the thread that unpins
    seconds = time.perf_counter() - begin_s
    problem = f"{left_nbytes:,} bytes are still pinned after their last view"
    yield judged(left_nbytes == 0, "unregister-1", problem, s_per_gib=seconds / nbytes * GIB)


_kept: list[object] = []


def _nvml_used_nbytes() -> int | None:
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used
    except pynvml.NVMLError:
        return None


def _huge_nbytes(address: int) -> int | None:
    """How much of the map at an address lies in huge pages; None where the kernel does not say."""
    is_it = False
    try:
        for line in Path("/proc/self/smaps").read_text().splitlines():
            word = line.split(maxsplit=1)[0]
            if "-" in word and not word.endswith(":"):
                first, last = (int(bound, 16) for bound in word.split("-"))
                is_it = first <= address < last
            elif is_it and word == "AnonHugePages:":
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def unpin_in_capture(size: Size) -> Iterator[Fact]:
    """Home memory goes while a graph is captured: that breaks no capture, and the graph computes."""
    x = pattern(1000).to("cuda")
    home = _HomeView(size.view_numel)
    torch.add(x, home.view[:1000])
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.add(x, 1.0)
    except (RuntimeError, AttributeError) as error:
        yield info("unpin-in-capture", f"no graph is captured here at all: {str(error).splitlines()[0]}")
        return
    graph = torch.cuda.CUDAGraph()
    pinned = home.home
    with torch.cuda.graph(graph):
        y = torch.add(x, 1.0)
        pinned.close()
        del home
        left_nbytes = pinned.pinned_nbytes  # waits for the thread that unpins
        y.add_(1.0)
    x.add_(5.0)
    graph.replay()
    torch.cuda.synchronize()
    problem = f"{left_nbytes:,} bytes are still pinned" if left_nbytes else "the graph computes other numbers"
    holds = left_nbytes == 0 and torch.equal(y.cpu(), pattern(1000) + 7)
    yield judged(holds, "unpin-in-capture", problem)


def context(size: Size) -> Iterator[Fact]:
    """What the driver takes beside the allocator, step by step as libraries and kernels are loaded."""
    device = torch.device("cuda", torch.cuda.current_device())
    planned_nbytes = hardware_of(device).context_nbytes
    torch.ones(1, device=device)
    taken = {"bare": outside_allocator_nbytes(device)}
    a = torch.ones(512, 512, device=device)
    a @ a
    taken["with_products"] = outside_allocator_nbytes(device)
    train_a_little(device)
    taken["trained"] = outside_allocator_nbytes(device)
    edge = min(8192, size.sizes.matrix)
    half = torch.ones(edge, edge, device=device, dtype=torch.float16)
    half @ half
    taken["with_large_products"] = outside_allocator_nbytes(device)
    figures = {f"{name}_nbytes": nbytes for name, nbytes in taken.items()}
    figures["process_nbytes"] = process_nbytes(os.getpid())
    figures["reserved_nbytes"] = torch.cuda.memory_reserved(device)
    yield judged(
        taken["with_large_products"] <= planned_nbytes,
        "context",
        "more is taken than plans reckon with",
        planned_nbytes=planned_nbytes,
        **figures,
    )


def cublas(size: Size) -> Iterator[Fact]:
    """Workspaces of cuBLAS and cuBLASLt in the user's thread and in autograd's, against what is set aside."""
    x, out = (torch.ones(512, 512, device="cuda", dtype=torch.float16) for _ in range(2))
    bias = torch.ones(512, device="cuda", dtype=torch.float16)
    found: list[int] = []

    def products() -> None:
        before = torch.cuda.memory_allocated()
        torch.mm(x, x, out=out)
        torch.addmm(bias, x, x, out=out)
        torch.cuda.synchronize()
        found.append(torch.cuda.memory_allocated() - before)

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            products()
            return gradient

    products()
    InBackward.apply(torch.ones(4, device="cuda", requires_grad=True)).sum().backward()
    planned = overhead_of(torch.device("cuda", torch.cuda.current_device())) - rounded_nbytes(TABLES_NBYTES)
    yield judged(
        sum(found) <= planned,
        "cublas",
        "workspaces take more than is set aside",
        forward_nbytes=found[0],
        backward_nbytes=found[1],
        planned_nbytes=planned,
    )


_BACKENDS = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
}


def attention_choice(size: Size) -> Iterator[Fact]:
    """Which kernel attention takes, and which plans say that it takes."""
    capability = torch.cuda.get_device_capability()
    taken, planned = [], []
    for batch, heads, rows, width in size.attention_shapes:
        for dtype in (torch.bfloat16, torch.float32):
            shape = (batch, heads, rows, width)
            operands = [torch.empty(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
            number = torch._fused_sdp_choice(*operands, is_causal=True)
            taken.append(_BACKENDS.get(SDPBackend(number), str(number)))
            planned.append(attention_kernel(*operands, None, capability, causal=True, cudnn=may_take_cudnn()))
    yield judged(taken == planned, "attention-choice", "plans say another kernel", taken=taken, planned=planned)


def attention(size: Size, kind: str) -> Iterator[Fact]:
    """What a kernel asks of the allocator, forward and backward, against its bound; and its bits twice."""
    if kind == "cudnn" and not (torch.backends.cudnn.enabled and torch.backends.cudnn.is_available()):
        yield info("attention-cudnn", "there is no cuDNN here, or it is switched off")
        return
    torch.manual_seed(0)
    for shape in size.attention_shapes:
        for backward in (False, True):
            yield _attention_memory(kind, shape, backward)
    yield _attention_bits(kind, size.bits_rows)


def _attention_memory(kind: str, shape: tuple[int, int, int, int], backward: bool) -> Fact:
    op, arguments = attention_call(kind, backward=backward, shape=shape)
    nbytes, results = taken_nbytes(op, arguments, {})
    bound = cuda_scratch_nbytes(op, arguments, {}, results)
    known = cuda_output_nbytes(op, arguments, {}, results)
    wrong = [
        position
        for position, made in enumerate(tree_leaves(results))
        if isinstance(made, Tensor)
        and position in known
        and (rounded_nbytes(made.untyped_storage().nbytes()) if made.is_cuda else 0) != known[position]
    ]
    name = f"attention-{kind}-{'backward' if backward else 'forward'}"
    problem = "takes more than its bound" if nbytes > bound else f"results {wrong} take other bytes than planned"
    return judged(nbytes <= bound and not wrong, name, problem, shape=shape, nbytes=nbytes, bound_nbytes=bound)


def _attention_bits(kind: str, rows: int) -> Fact:
    """The same backward several times: where sums are added in any order, gradients differ in their last bits."""
    op, arguments = attention_call(kind, backward=True, shape=(2, 8, rows, 64))
    runs = [[t.clone() for t in tree_leaves(op(*arguments)) if isinstance(t, Tensor)] for _ in range(6)]
    same = all(torch.equal(first, other) for run in runs[1:] for first, other in zip(runs[0], run, strict=True))
    return info(f"attention-{kind}-bits", rows=rows, same_bits=same)


def expandable_segments(size: Size) -> Iterator[Fact]:
    """The allocator as chunkc switches it, under a limit 3 % above what a step needs.

    In each step blocks are given back from all over and others are taken in their place: first ones that fit into a
    gap, then ("scattered") one as large as four gaps together, for which pages have to be mapped elsewhere.
    """
    use_expandable_segments()
    external_nbytes = [size.block_nbytes * number for number in (3, 1, 4, 1, 5, 9, 2, 6)]
    peak = sum(external_nbytes)

    def step(num_gaps: int) -> None:
        held = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for nbytes in external_nbytes]
        for tensor in held:
            tensor[-1:].fill_(1)
        gaps = external_nbytes[0 : 2 * num_gaps : 2]
        del tensor, held[0 : 2 * num_gaps : 2]
        torch.empty(sum(gaps), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    def steps(num_gaps: int) -> tuple[list[int], list[float]]:
        """Retries of the allocator, and milliseconds, of each of four steps."""
        retries, milliseconds = [], []
        for _ in range(4):
            before, begin_s = _num_retries(), time.perf_counter()
            step(num_gaps)
            milliseconds.append(1e3 * (time.perf_counter() - begin_s))
            retries.append(_num_retries() - before)
        return retries, milliseconds

    with memory_limit(peak + max(int(0.03 * peak), 100 * MIB), torch.cuda.current_device()):
        retries, milliseconds = steps(1)
        scattered_retries, scattered_ms = steps(4)
        kinds = {bool(segment.get("is_expandable")) for segment in torch.cuda.memory_snapshot()}
        reserved = torch.cuda.max_memory_reserved()
    problem = "segments are not expandable: blocks cannot be split exactly"
    figures = {"peak_nbytes": peak, "max_reserved_nbytes": reserved}
    yield judged(kinds == {True}, "expandable-segments", problem, **figures)
    yield info(
        "retries-under-a-limit",
        retries=retries,
        step_ms=milliseconds,
        scattered_retries=scattered_retries,
        scattered_step_ms=scattered_ms,
    )


def _num_retries() -> int:
    return torch.cuda.memory_stats().get("num_alloc_retries", 0)


def pageable_memory(size: Size) -> Iterator[Fact]:
    """Where the driver gives the device pageable memory: kernels of torch's and of Triton's read and write it."""
    gpu = TorchGpu()
    problem = gpu.cannot_view_pageable()
    if problem is not None:
        yield info("pageable-memory", problem)
        return
    numel = size.triton_numel
    home = MemoryHome()
    host = home.tensor(home.allocate(4 * numel), torch.float32, (numel,), (1,), 0)
    host.copy_(pattern(numel))
    view = on_device(gpu, host)
    rate = _gb_per_s(view.nbytes, lambda: torch.add(view, 0.0), size)
    view.add_(1.0)
    torch.cuda.synchronize()
    yield judged(torch.equal(host, pattern(numel) + 1), "pageable-memory", "other numbers", read_gb_per_s=rate)
    _add_one(view)
    yield judged(torch.equal(host, pattern(numel) + 2), "pageable-triton", "other numbers")
