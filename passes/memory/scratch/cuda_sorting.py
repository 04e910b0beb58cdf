"""Bound the scratch of operators that sort or add up along a row on CUDA devices; see `cuda_rules`.

ATen calls CUB, which takes one workspace. How it divides that depends on the dtype and on the device's generation; the
bounds here hold for all. They were compared with what the GPU made of RAM was asked for, by PyTorch 2.13 for CUDA 13.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.copies import nbytes_of
from chunkc.passes.memory.scratch.cuda_reduction import MULTIPROCESSORS, reduction_nbytes
from chunkc.passes.memory.scratch.cuda_rules import is_dense
from chunkc.passes.memory.scratch.rules import Call, bound_call, cast_nbytes, contiguous

_MIB = 1 << 20
_THREADS, _THREAD_NBYTES = 256, 19 * 4
"""Of the one block that sorts as few elements as its threads can hold."""
_CHECKS_NBYTES = 16 << 10
"""More than the sums of checked weights take."""
_SMALL = 4096
_FULL = 1_000_000
_SEGMENTS = 128
_SEVERAL_BLOCKS = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))


def sort_nbytes(num: int, key: int, value: int) -> int:
    """Bound CUB's workspace to sort `num` keys with values, of `key` and `value` bytes each.

    It holds a copy of both, and counts of digits: one for each of at least 2,816 elements, or of keys under 4 bytes one
    for each block of threads that a device has room for.
    """
    if num <= _THREADS * (_THREAD_NBYTES // max(key, value)):
        return 1
    return (key + value) * num + num // 2 + (7 * _MIB if key < 4 else 32 << 10)


def scan_nbytes(num: int, itemsize: int) -> int:
    """Bound CUB's workspace to add up `num` numbers of `itemsize` bytes each: two sums a block of threads."""
    return num * max(4, itemsize) ** 2 // 2048 + 4096


def sort(call: Call) -> list[int]:
    """Count a sort of rows, and before it a contiguous copy of them and of the results.

    Rows of up to 4,096 elements are sorted in place, with their positions, which are counted up first. A single longer
    row, or each of a million elements or more, is sorted as a whole. Fewer than 128 rows are sorted together, with the
    row and position of each element; more rows in CUB's segmented sort. Sources: `Sort.cpp`, `SortStable.cu`.
    """
    source = call["self"]
    if source.dim() == 0:
        return []
    dim, key, num = call.arguments.get("dim", -1), source.itemsize, source.numel()
    length = source.shape[dim]
    if length <= _SMALL:
        return [8 * length]
    copies = [] if is_dense(source) and source.stride(dim) == 1 else [key * num, key * num, 8 * num]
    if num == length or length >= _FULL:
        return [*copies, 8 * length, sort_nbytes(length, key, 8)]
    if num < _SEGMENTS * length:
        return [*copies, 8 * num, 8 * num, key * num, sort_nbytes(num, key, 8)]
    return [*copies, 8 * num, (key + 8) * num + 1024]


def bounded_sort(call: Call) -> list[int]:
    """Bound a sort: five copies of values and int64 indices, CUB's among them: `TensorModeKernel.cu`."""
    return _sorted(max(call.tensors, key=lambda tensor: tensor.numel()))


def _sorted(source: Tensor) -> list[int]:
    num, key = source.numel(), source.itemsize
    return [*(5 * [(key + 8) * num]), num // 2, (8 if key < 4 else 1) * _MIB]


def median(call: Call) -> list[int]:
    """Count contiguous copies where rows have a median each, else bound all elements sorted: `Sorting.cpp`.

    With their positions, and with a mask of NaNs, which are counted.
    """
    source = call.tensors[0]
    if call.arguments.get("dim") is not None or call.name.startswith("kthvalue") or not source.dim():
        return contiguous(call)
    row = source.new_empty(source.numel(), device="meta")
    sorting = sort(bound_call(torch.ops.aten.sort.default, (row,), {}, row))
    return [*contiguous(call), nbytes_of(row), 8 * row.numel(), *sorting, row.numel(), 8]


def topk(call: Call) -> list[int]:
    """Count contiguous copies, what several blocks of threads share a row by, and a sort of many results a row.

    Source: `TensorTopK.cu`.
    """
    source, dim = call["self"], call.arguments.get("dim", -1)
    length = source.shape[dim] if source.dim() else 1
    num_rows = source.numel() // length if length else 0
    blocks = _blocks(num_rows, length) if length and _takes_several_blocks(num_rows, length) else []
    return [*contiguous(call), *blocks, *(_sorted(call.outputs[0]) if call["k"] > _SMALL else [])]


def _blocks(num_rows: int, length: int) -> list[int]:
    """Bound 256 16-bit counts a block of threads and two more, and 256 sums a row: as `get_items_per_thread` has it.

    A thread takes 4 to 64 elements, so many that blocks have room on the multiprocessors, 8 on each.
    """
    numel = num_rows * length
    num_blocks = torch.sym_min(numel // 1024, 8 * MULTIPROCESSORS) + numel // 16_384 + num_rows
    return [2 * 256 * num_blocks, 8 * num_blocks, 4 * 256 * num_rows, *(8 * [8 * num_rows])]


def _takes_several_blocks(num_rows: int, length: int) -> bool:
    """Whether several blocks of threads take one row: `TensorTopK.cu`, `should_use_multiblock`."""
    return length >= next((least for most, least in _SEVERAL_BLOCKS if num_rows <= most), 400)


def sample(call: Call) -> list[int]:
    """Bound normalised weights and sums, or random keys and what the choice of the largest takes.

    Sources: `ATen/native/Distributions.cpp`, `MultinomialKernel.cu`.
    """
    source = call["self"]
    num_rows, length = source.numel() // max(1, source.shape[-1]), source.shape[-1]
    copies = [nbytes_of(source)] * (3 if call.arguments.get("replacement") else 1)
    choosing = reduction_nbytes(max(1, num_rows), length, over_fastest=True, itemsize=16)
    if call["num_samples"] > 1 and _takes_several_blocks(num_rows, length):
        choosing = _blocks(num_rows, length)
    return [*copies, *contiguous(call), *(3 * [8 * num_rows]), *choosing, _CHECKS_NBYTES]


def permutation(call: Call) -> list[int]:
    """Bound numbers in order and random keys of 8 bytes (they may have 4), sorted: `Randperm.cu`."""
    num = max(tensor.numel() for tensor in call.outputs)
    return [*(3 * [8 * num]), sort_nbytes(num, 8, 8)]


def scan(call: Call) -> list[int]:
    """Count a cast to the dtype of the result, a contiguous copy, and for a single row CUB's workspace.

    Sources: `ATen/native/ReduceOps.cpp`, `ScanUtils.cuh`.
    """
    source, dim, dtype = call.tensors[0], call.arguments.get("dim", 0), call.outputs[0].dtype
    converted = cast_nbytes(source, dtype)
    in_rows = source.is_contiguous() or (source.dtype != dtype and not is_dense(source))
    found = [converted, *([] if in_rows else [source.numel() * dtype.itemsize])]
    if call.name in ("cummax", "cummin") or (source.dim() and source.numel() != source.shape[dim]):
        return found
    return [*found, scan_nbytes(source.numel(), dtype.itemsize)]


def masked_scatter(call: Call) -> list[int]:
    """Count an int64 prefix sum of the mask, CUB's workspace, and contiguous copies of mask and source.

    Source: `IndexKernel.cpp`, `masked_scatter_cuda`.
    """
    mask, source, num = call["mask"], call["source"], call.outputs[0].numel()
    copies = [] if mask.is_contiguous() and mask.numel() == num else [num]
    copies += [] if source.is_contiguous() else [nbytes_of(source)]
    return [*copies, 8 * num, scan_nbytes(num, 8)]
