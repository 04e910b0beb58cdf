"""Bound the scratch of operators that sort or add up along a row on CUDA devices; see `cuda_rules`.

ATen calls CUB, which takes one workspace: parts, each a multiple of 256 bytes, and 255 bytes more. A block of threads
takes a tile of elements. How large a tile is, CUB has tuned for each generation and size of element; here it is the
smallest that any has, which needs the most room, but for the tiles of int64 keys with int64 positions, which index
gradients: these are known. Sizes were measured on the GPU made of RAM with PyTorch 2.13 for CUDA 13.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chunkc.passes.graphs.attention_cuda import Capability
from chunkc.passes.memory.scratch.copies import nbytes_of
from chunkc.passes.memory.scratch.cuda_reduction import MULTIPROCESSORS, reduction_nbytes
from chunkc.passes.memory.scratch.cuda_rules import is_dense, largest
from chunkc.passes.memory.scratch.rules import Call, bound_call, cast_nbytes, contiguous

_MIB = 1 << 20
_PART_NBYTES = 256
_TILES_OF_INT64 = {7: 2816, 8: 3840, 9: 4608}
"""Elements of a tile by compute capability's major number: `tuning/tuning_radix_sort.cuh`."""
_SMALLEST_TILE = 2816
_UNIQUE_TILES_OF_INT64: dict[Capability | None, int] = {(8, 0): 1344, (9, 0): 4928}
_SMALLEST_UNIQUE_TILE = 320  # `tuning/tuning_unique_by_key.cuh`
_THREADS, _THREAD_NBYTES = 256, 19 * 4
"""Of the one block that sorts as few elements as its threads can hold."""
_PADDING_TILES = 32
_HOPPER = 9
_COUNTS_NBYTES = 8 * (5 * 8 * MULTIPROCESSORS * 128 + 5632)
"""The most that blocks pass on where keys of 1 or 2 bytes are not sorted on Hopper: 5 counts a digit and block."""

_CHECKS_NBYTES = 16 << 10
"""More than the sums of checked weights take."""
_SMALL = 4096
_FULL = 1_000_000
_SEGMENTS = 128
_MOST = (1 << 31) - 1
_AT_ONCE = (1 << 28) - (1 << 14)
_SCANNED_AT_ONCE = 1 << 30
_SEVERAL_BLOCKS = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))


def _workspace(*parts: int) -> int:
    return sum(-(-part // _PART_NBYTES) * _PART_NBYTES for part in parts) + _PART_NBYTES - 1


def radix_sort_nbytes(num: int, key: int, value: int, num_bits: int, capability: Capability | None) -> int:
    """Bound CUB's workspace to sort `num` keys with values, by the lowest `num_bits` of the keys.

    Keys and values have `key` and `value` bytes each. They are copied if they are sorted by more than 8 bits. There are
    256 counts of 8 bytes for every 8 bits, and 256 of 4 bytes a tile. Exact for 8 bytes each where the capability is
    known.
    """
    if num <= _THREADS * (_THREAD_NBYTES // max(key, value)):
        return 1
    major = 0 if capability is None else capability[0]
    is_old = key < 4 and major != _HOPPER
    tile = _TILES_OF_INT64.get(major, _SMALLEST_TILE) if key == value == 8 else _SMALLEST_TILE
    num_passes = -(-num_bits // 8) * (1 + num // _AT_ONCE)
    copies = [key * num, value * num] if num_bits > 8 or is_old else []
    counts = [_COUNTS_NBYTES] if is_old else [num_passes * 256 * 8, -(-num // tile) * 256 * 4, 4 * num_passes]
    return _workspace(*counts, *copies)


def unique_nbytes(num: int, key: int, capability: Capability | None) -> int:
    """Bound CUB's workspace to find the unique ones of `num` sorted keys: 16 bytes a tile."""
    tile = _UNIQUE_TILES_OF_INT64.get(capability, _SMALLEST_UNIQUE_TILE) if key == 8 else _SMALLEST_UNIQUE_TILE
    return _workspace(_workspace(16 * (-(-num // tile) + _PADDING_TILES)))


def scan_nbytes(num: int, itemsize: int, *, halves: bool = False) -> int:
    """Count CUB's workspace to add up `num` numbers of `itemsize` bytes; `halves`: they are 16-bit floats."""
    num_states = -(-num // (128 * max(1, min(15 * 4 // itemsize, 30)))) + _PADDING_TILES
    states = [4 * num_states, *(2 * [itemsize * num_states])] if halves else [2 * itemsize * num_states]
    return _workspace(_workspace(*states))


def sort(call: Call) -> list[int]:
    """Count a sort of rows, and before it a contiguous copy of them and of the results.

    Rows of up to 4,096 elements are sorted in place, with their positions, which are counted up first. A single longer
    row, or each of a million elements or more, is sorted as a whole. Fewer than 128 rows are sorted together, with the
    row and position of each element; more rows in CUB's segmented sort. Sources: `Sort.cpp`, `SortStable.cu`.
    """
    source, values = call["self"], call.outputs[0]
    if source.dim() == 0:
        return []
    dim, key = call.arguments.get("dim", -1), source.itemsize
    length = source.shape[dim]
    if length <= _SMALL:
        return [8 * length]
    num = source.numel() if source.numel() <= _MOST else _MOST // length * length
    copies = []
    if not (is_dense(source) and source.stride(dim) == 1):
        copies = [nbytes_of(source)]
        if values.stride(dim) != 1 or any(size == 1 for size in source.shape):  # then strides may not be alike
            copies += [nbytes_of(source), 8 * source.numel()]
    num_rows = num // length
    if num_rows == 1 or length >= _FULL:
        return [*copies, 8 * length, radix_sort_nbytes(length, key, 8, 8 * key, call.capability)]
    if num_rows < _SEGMENTS:
        return [*copies, 8 * num, 8 * num, key * num, radix_sort_nbytes(num, key, 8, 8 * key, call.capability)]
    return [*copies, 8 * num, _workspace(key * num, 8 * num)]


def bounded_sort(call: Call) -> list[int]:
    """Bound a sort: four copies of values and int64 indices, CUB's among them, and its counts for keys under 4 bytes.

    Source: `TensorModeKernel.cu`.
    """
    return _sorted(max(call.tensors, key=lambda tensor: tensor.numel()))


def _sorted(source: Tensor) -> list[int]:
    numel, itemsize = source.numel(), source.itemsize
    return [*(4 * [numel * (itemsize + 8)]), _MIB + numel // 8, _COUNTS_NBYTES if itemsize < 4 else 0]


def median(call: Call) -> list[int]:
    """Count contiguous copies where rows have a median each, else bound all elements sorted: `Sorting.cpp`.

    With their positions, and with a mask of NaNs, which are counted.
    """
    source = call.tensors[0]
    if call.arguments.get("dim") is not None or call.name.startswith("kthvalue") or not source.dim():
        return contiguous(call)
    numel = source.numel()
    row = source.new_empty(numel, device="meta")
    sorting = sort(bound_call(torch.ops.aten.sort.default, (row,), {}, row, capability=call.capability))
    return [*contiguous(call), nbytes_of(source), 8 * numel, *largest(sorting, [numel, 8 * numel, 8])]


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
    return [*(3 * [8 * num]), radix_sort_nbytes(num, 8, 8, 64, call.capability)]


def scan(call: Call) -> list[int]:
    """Count a cast to the dtype of the result, a contiguous copy, and for a single row CUB's scratch.

    Sources: `ATen/native/ReduceOps.cpp`, `ScanUtils.cuh`.
    """
    source, dim, dtype = call.tensors[0], call.arguments.get("dim", 0), call.outputs[0].dtype
    converted = cast_nbytes(source, dtype)
    in_rows = source.is_contiguous() or (source.dtype != dtype and not is_dense(source))
    found = [converted, *([] if in_rows else [source.numel() * dtype.itemsize])]
    if call.name in ("cummax", "cummin") or (source.dim() and source.numel() != source.shape[dim]):
        return found
    num, halves = source.numel(), dtype.is_floating_point and dtype.itemsize == 2
    if dtype.is_complex or (dtype.itemsize < 4 and not halves):
        return [*found, _MIB + num // 8]
    part = [scan_nbytes(min(num, _SCANNED_AT_ONCE), dtype.itemsize, halves=halves)]
    return [*found, *part, *([] if num <= _SCANNED_AT_ONCE else [512])]


def masked_scatter(call: Call) -> list[int]:
    """Count an int64 prefix sum of the mask, CUB's scratch, and contiguous copies of mask and source.

    Source: `IndexKernel.cpp`, `masked_scatter_cuda`.
    """
    mask, source, num = call["mask"], call["source"], call.outputs[0].numel()
    copies = [] if mask.is_contiguous() and mask.numel() == num else [num]
    copies += [] if source.is_contiguous() else [nbytes_of(source)]
    return [*copies, 8 * num, scan_nbytes(num, 8)]
