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
    """`Sort.cpp`, `SortStable.cu`. Rows of up to 4,096 are sorted in place, with their positions, which are counted up
    first. A long one is sorted as a whole. Several are sorted together, with the row and position of each; or each row
    by itself, in a sort of segments. Before that, a copy in which they lie as rows; results then lie so first, too."""
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
    """`TensorTopK.cu`, `Sorting.cpp`, `TensorModeKernel.cu`: values and int64 indices once more, doubled by CUB's sort,
    and what keys of less than 4 bytes may need besides."""
    source = max(call.inputs, key=lambda tensor: tensor.numel())
    numel, itemsize = source.numel(), max(tensor.itemsize for tensor in call.inputs)
    counts = [cuda_cub.radix_sort(numel, itemsize, 8, 8, None)] if itemsize < 4 else []
    return [numel * (itemsize + 8)] * 4 + [_MIB + numel // 8, *counts]


def topk(call: Call) -> list[int]:
    """`TensorTopK.cu`: nothing, where a block takes each row; a copy if the operand is not contiguous."""
    source, dim = call.tensor("self"), call.arguments.get("dim", -1)
    length = source.shape[dim] if source.dim() else 1
    if call.arguments["k"] > _SMALL or (length and _takes_several_blocks(source.numel() // length, length)):
        return bounded_sort(call)
    return contiguous(call)


def _takes_several_blocks(num_rows: int, length: int) -> bool:
    """`TensorTopK.cu`, `should_use_multiblock`."""
    for most, least in _SEVERAL_BLOCKS:
        if num_rows <= most:
            return length >= least
    return length >= 400


def sample(call: Call) -> list[int]:
    """`ATen/native/Distributions.cpp`, `MultinomialKernel.cu`: normalised weights, sums or random keys, sorted."""
    return [4 * tensor.numel() for tensor in call.inputs for _ in range(4)] + bounded_sort(call)


def permutation(call: Call) -> list[int]:
    """`Randperm.cu`: numbers in order, and random keys, sorted. Keys may have 4 bytes; a bound."""
    num = max(tensor.numel() for tensor in call.outputs)
    return [*(3 * [8 * num]), cuda_cub.radix_sort(num, 8, 8, 64, call.capability)]


def scan(call: Call) -> list[int]:
    """`ScanUtils.cuh`: a contiguous copy; and of a single row, CUB's scratch. `ATen/native/ReduceOps.cpp`: before that,
    one in the dtype of the result, if that is another."""
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
    """`IndexKernel.cpp`, `masked_scatter_cuda`: the mask in rows, an int64 sum up to each of its elements, and CUB's
    scratch."""
    mask, result = call.tensor("mask"), call.outputs[0]
    num = result.numel()
    in_rows = mask.is_contiguous() and mask.numel() == num
    source = call.tensor("source")
    copies = [] if source.is_contiguous() else [nbytes_of(source)]
    return [*([] if in_rows else [num]), 8 * num, cuda_cub.scan(num, 8), *copies]
