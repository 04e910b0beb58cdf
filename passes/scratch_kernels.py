"""Scratch bytes of ATen's CPU kernels that need arithmetic: matrix products, attention, convolution, copies.

Only numbers and tensor metadata go in. Sources: ATen's `FlashAttentionKernel.cpp`, `LinearAlgebra.cpp`,
`mkldnn/Matmul.cpp`, `Convolution.cpp` and `Copy.cpp`; what oneDNN takes was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_LOW_PRECISION = (torch.bfloat16, torch.float16)
# oneDNN works on blocks of 64 columns at most, and each thread packs what its share of a 2 MiB cache holds.
_BLOCK = 64
_CACHE_NBYTES = 2 << 20
_THREAD_NBYTES = 16 << 10


def _padded(size: int, block: int = _BLOCK) -> int:
    return -(-size // block) * block


def nbytes_of(tensor: Tensor, itemsize: int | None = None) -> int:
    """Bytes of a dense copy of `tensor`, in its own or another item size."""
    return tensor.numel() * (tensor.itemsize if itemsize is None else itemsize)


def contiguous_copy_nbytes(*tensors: Tensor | None) -> int:
    """Bytes of `t.contiguous()` for those that are not contiguous, with what the copying itself takes."""
    strided = [t for t in tensors if t is not None and not t.is_contiguous()]
    return sum(map(nbytes_of, strided)) + max(map(copy_block_nbytes, strided), default=0)


def copy_block_nbytes(source: Tensor) -> int:
    """Bytes of the square block through which ATen copies a transposed matrix; 0 for any other copy."""
    matrix = source.dim() == 2 and source.stride(0) == 1 and source.stride(1) == source.shape[0]
    if not matrix or source.numel() < 60 * 60:
        return 0
    return 120 * 120 if source.itemsize == 1 else 60 * 60 * source.itemsize


def uses_onednn(dtype: torch.dtype) -> bool:
    """Whether matrix products in `dtype` may run in oneDNN, with scratch from torch's allocator."""
    return dtype in _LOW_PRECISION or (dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest")


def gemm_nbytes(dtype: torch.dtype, rows: int, inner: int, columns: int, num_threads: int) -> int:
    """Upper bound for packing and accumulating one product `[rows, inner] @ [inner, columns]`.

    Full-precision products run in BLAS, which allocates by itself. oneDNN's are bounded per thread by all
    three matrices (padded, accumulated in float32), or by what it keeps in a cache.
    """
    if not uses_onednn(dtype):
        return 0
    m, k, n = _padded(rows), _padded(inner), _padded(columns)
    whole = 2 * (m * k + k * n) + 4 * m * n
    blocked = _CACHE_NBYTES + 2 * 2 * _BLOCK * k
    return num_threads * (min(whole, blocked) + _THREAD_NBYTES)


def operand_copy_nbytes(operand: Tensor) -> int:
    """Bytes of the copy that a matrix product makes of an operand whose strides its library cannot take."""
    if operand.dim() < 2 or uses_onednn(operand.dtype):
        dense = operand.is_contiguous() or (operand.dim() >= 2 and operand.transpose(-1, -2).is_contiguous())
        return 0 if dense else nbytes_of(operand)
    (rows, columns), (row_stride, column_stride) = operand.shape[-2:], operand.stride()[-2:]
    by_rows = column_stride == 1 and row_stride >= max(1, columns)
    by_columns = row_stride == 1 and column_stride >= max(1, rows)
    return 0 if by_rows or by_columns else nbytes_of(operand)


def _attention_blocks(num_queries: int, num_keys: int) -> tuple[int, int]:
    """Rows of queries and of keys that one thread handles at a time."""
    rows = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return min(rows, num_queries), min(512, num_keys)


def _attention_gemm_nbytes(dtype: torch.dtype, rows: int, keys: int, head: int, num_threads: int) -> int:
    shapes = ((keys, head, rows), (head, keys, rows), (head, rows, keys))
    if not uses_onednn(dtype):
        return 0
    # Operands and outputs are strided here, so oneDNN takes buffers for them: 3 times as much was measured.
    return num_threads * max(4 * gemm_nbytes(dtype, *shape, 1) for shape in shapes)


def attention_nbytes(query: Tensor, key: Tensor, num_threads: int) -> int:
    """`_scaled_dot_product_flash_attention_for_cpu`: scores, maxima, sums and output per thread."""
    head = query.shape[-1]
    rows, keys = _attention_blocks(query.shape[-2], key.shape[-2])
    accumulated = 8 if query.dtype == torch.float64 else 4
    nbytes = num_threads * accumulated * rows * (keys + 2 + head)
    if query.dtype in _LOW_PRECISION:
        # float16 may pad keys and heads to blocks where the processor packs it.
        nbytes = num_threads * accumulated * rows * (_padded(keys) + 2 + _padded(head))
        nbytes += num_threads * query.itemsize * rows * (keys + 1)
    return nbytes + _attention_gemm_nbytes(query.dtype, rows, keys, head, num_threads)


def attention_backward_nbytes(grad_out: Tensor, query: Tensor, key: Tensor, num_threads: int) -> int:
    """Its backward: scores and gradient per thread, a row sum per busy thread, a copy of `grad_out`."""
    head = query.shape[-1]
    rows, keys = _attention_blocks(query.shape[-2], key.shape[-2])
    accumulated = 8 if query.dtype == torch.float64 else 4
    num_busy = min(num_threads, query.shape[0] * query.shape[1])
    nbytes = num_threads * accumulated * 2 * rows * keys + num_busy * accumulated * rows
    if query.dtype in _LOW_PRECISION:
        nbytes += num_threads * query.itemsize * 2 * rows * keys
    nbytes += contiguous_copy_nbytes(grad_out.transpose(1, 2))
    return nbytes + _attention_gemm_nbytes(query.dtype, rows, keys, head, num_threads)


def convolution_nbytes(
    input: Tensor,
    weight: Tensor,
    output_shape: Sequence[int],
    *,
    groups: int,
    num_threads: int,
    backward: bool = False,
    transposed: bool = False,
) -> int:
    """Upper bound for a convolution or its backward (`output_shape` is then the incoming gradient's).

    oneDNN reorders input, weight and output into blocks of channels; in low precision the channels of each
    group are padded and accumulators are float32. A backward sums one weight gradient per thread. Where
    ATen's own kernel may run instead, it unfolds the input: one column per position, as long as a filter.
    """
    if not backward and not transposed:
        known = _blocked_forward_nbytes(input, weight, output_shape, groups, num_threads)
        if known is not None and not _may_unfold(input, weight, groups):
            return known
    low = input.dtype in _LOW_PRECISION
    itemsize = 4 if low else input.itemsize
    spatial = math.prod(weight.shape[2:])
    depthwise = groups > 1 and groups == input.shape[1] == output_shape[1]
    channels_last = not input.is_contiguous()
    if depthwise and not (channels_last and backward):  # blocks span the groups
        num_groups, block, filters = 1, 16, _padded(groups) * spatial * itemsize
    else:
        num_groups, block = (1, 16) if depthwise else (groups, 32 if low else 16)
        block_w = 16 if depthwise else block
        outer, inner = _padded(-(-weight.shape[0] // groups), block_w), _padded(weight.shape[1], block_w)
        filters = groups * outer * inner * spatial * itemsize
        filters *= 2 if channels_last else 1

    def blocked(shape: Sequence[int]) -> int:
        channels = num_groups * _padded(-(-shape[1] // num_groups), block)
        return shape[0] * channels * math.prod(shape[2:]) * itemsize

    nbytes = blocked(input.shape) + blocked(output_shape) + filters
    nbytes += num_threads * (1 << 20 if low else 64 << 10) + (num_threads * filters if backward else 0)
    if spatial == 1 and tuple(input.shape[2:]) != tuple(output_shape[2:]):
        nbytes += num_threads * input.shape[1] * math.prod(output_shape[2:]) * itemsize  # the pixels it reads, gathered
    if transposed or _may_unfold(input, weight, groups):
        channels, positions = input.shape[1], math.prod(output_shape[2:])
        if transposed:
            channels, positions = output_shape[1], math.prod(input.shape[2:])
        nbytes += input.shape[0] * channels * spatial * positions * input.itemsize + nbytes_of(weight)
    return nbytes


def _blocked_forward_nbytes(
    input: Tensor, weight: Tensor, output_shape: Sequence[int], groups: int, num_threads: int
) -> int | None:
    """A forward in float32, as oneDNN does it with AVX-512's blocks of 16 channels; None where that is not known.

    Plain images whose channels fill blocks: image, filters and result are reordered, and the result goes back to its
    plain format when the others are gone. With channels last (image or filters), one group: both are copied into that
    format, filters are reordered, and 4 KiB are for each thread. Filters of one pixel need neither on one thread.
    """
    if input.dtype != torch.float32 or input.dim() != 4 or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    pixels, copies = math.prod(weight.shape[2:]), 0
    direct = pixels == 1 and num_threads == 1
    if math.prod(output_shape[2:]) < 4:
        return None  # results of a pixel or two run as matrix products
    if pixels == 1 and tuple(input.shape[2:]) != tuple(output_shape[2:]):
        return None  # strided filters of one pixel gather their input first
    last = [not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last) for t in (input, weight)]
    if any(last):
        if groups != 1 or not all(last[i] or t.is_contiguous() for i, t in enumerate((input, weight))):
            return None
        copies += 0 if last[0] else nbytes_of(input)
        copies += 0 if last[1] or pixels == 1 else nbytes_of(weight)
        filters = _padded(weight.shape[0], 16) * weight.shape[1] * pixels * 4
        return copies if direct else copies + filters + 4096 + 4120 * num_threads
    per_group = (weight.shape[0] // groups, weight.shape[1])
    depthwise = per_group == (1, 1) and groups % 16 == 0
    fills = depthwise or all(channels % 16 == 0 for channels in per_group)
    if not (fills and input.is_contiguous() and weight.is_contiguous()):
        return None
    return 0 if direct else max(nbytes_of(input) + nbytes_of(weight), math.prod(output_shape) * 4)


def _may_unfold(input: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether ATen's own convolution may run: other dtypes, small single images, old processors."""
    if input.dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if input.dtype == torch.float16:
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    small = input.shape[0] == 1 and input.numel() <= 20480 and groups == 1 and min(weight.shape[-2:]) <= 3
    return input.dtype != torch.float32 or small
