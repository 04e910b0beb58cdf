"""Rules of CUDA devices for operators that sort or add up along a row; see `cuda_rules`."""

from __future__ import annotations

from chunkc.passes.memory.scratch import cuda_cub
from chunkc.passes.memory.scratch.cuda_rules import Call, cast, contiguous, is_dense, nbytes_of

_MIB = 1 << 20
_SMALL = 4096
_FULL = 1_000_000
_SEGMENTS = 128
_MOST = (1 << 31) - 1
_SCANNED_AT_ONCE = 1 << 30
_SEVERAL_BLOCKS = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))


def sort(call: Call) -> list[int]:
    """Count a sort of rows, and before it a contiguous copy of them and of the results.

    Rows of up to 4,096 elements are sorted in place, with their positions, which are counted up first. A single longer
    row, or each of a million elements or more, is sorted as a whole. Fewer than 128 rows are sorted together, with the
    row and position of each element; more rows in CUB's segmented sort. Sources: `Sort.cpp`, `SortStable.cu`.
    """
    source, values = call.tensor("self"), call.outputs[0]
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
        if values.stride(dim) != 1:
            copies += [nbytes_of(source), 8 * source.numel()]
    num_rows = num // length
    if num_rows == 1 or length >= _FULL:
        return [*copies, 8 * length, cuda_cub.radix_sort(length, key, 8, 8 * key, call.capability)]
    if num_rows < _SEGMENTS:
        return [*copies, 8 * num, 8 * num, key * num, cuda_cub.radix_sort(num, key, 8, 8 * key, call.capability)]
    return [*copies, 8 * num, cuda_cub.segmented_radix_sort(num, key, 8)]


def bounded_sort(call: Call) -> list[int]:
    """Bound a sort: four copies of values and int64 indices, CUB's among them, and its counts for keys under 4 bytes.

    Sources: `TensorTopK.cu`, `Sorting.cpp`, `TensorModeKernel.cu`.
    """
    source = max(call.inputs, key=lambda tensor: tensor.numel())
    numel, itemsize = source.numel(), max(tensor.itemsize for tensor in call.inputs)
    counts = [cuda_cub.radix_sort(numel, itemsize, 8, 8, None)] if itemsize < 4 else []
    return [numel * (itemsize + 8)] * 4 + [_MIB + numel // 8, *counts]


def topk(call: Call) -> list[int]:
    """Count a contiguous copy if a single block takes each row, else bound a sort: `TensorTopK.cu`."""
    source, dim = call.tensor("self"), call.arguments.get("dim", -1)
    length = source.shape[dim] if source.dim() else 1
    if call.arguments["k"] > _SMALL or (length and _takes_several_blocks(source.numel() // length, length)):
        return bounded_sort(call)
    return contiguous(call)


def _takes_several_blocks(num_rows: int, length: int) -> bool:
    """Whether several blocks of threads take one row: `TensorTopK.cu`, `should_use_multiblock`."""
    for most, least in _SEVERAL_BLOCKS:
        if num_rows <= most:
            return length >= least
    return length >= 400


def sample(call: Call) -> list[int]:
    """Bound normalised weights, sums or random keys, sorted.

    Sources: `ATen/native/Distributions.cpp`, `MultinomialKernel.cu`.
    """
    return [4 * tensor.numel() for tensor in call.inputs for _ in range(4)] + bounded_sort(call)


def permutation(call: Call) -> list[int]:
    """Bound numbers in order and random keys, sorted: `Randperm.cu`.

    Keys may have 4 bytes; 8 are counted.
    """
    num = max(tensor.numel() for tensor in call.outputs)
    return [*(3 * [8 * num]), cuda_cub.radix_sort(num, 8, 8, 64, call.capability)]


def scan(call: Call) -> list[int]:
    """Count a cast to the dtype of the result, a contiguous copy, and for a single row CUB's scratch.

    Sources: `ATen/native/ReduceOps.cpp`, `ScanUtils.cuh`.
    """
    source, dim, dtype = call.inputs[0], call.arguments.get("dim", 0), call.outputs[0].dtype
    converted = cast(source, dtype)
    in_rows = source.is_contiguous() or (converted and not is_dense(source))
    found = [*converted, *([] if in_rows else [source.numel() * dtype.itemsize])]
    if call.name in ("cummax", "cummin") or (source.dim() and source.numel() != source.shape[dim]):
        return found
    num, halves = source.numel(), dtype.is_floating_point and dtype.itemsize == 2
    if dtype.is_complex or (dtype.itemsize < 4 and not halves):
        return [*found, _MIB + num // 8]
    part = [cuda_cub.scan(min(num, _SCANNED_AT_ONCE), dtype.itemsize, halves=halves)]
    return [*found, *part, *([] if num <= _SCANNED_AT_ONCE else [512])]


def masked_scatter(call: Call) -> list[int]:
    """Count an int64 prefix sum of the mask, CUB's scratch, and contiguous copies of mask and source.

    Source: `IndexKernel.cpp`, `masked_scatter_cuda`.
    """
    mask, result = call.tensor("mask"), call.outputs[0]
    num = result.numel()
    in_rows = mask.is_contiguous() and mask.numel() == num
    source = call.tensor("source")
    copies = [] if source.is_contiguous() else [nbytes_of(source)]
    return [*([] if in_rows else [num]), 8 * num, cuda_cub.scan(num, 8), *copies]
