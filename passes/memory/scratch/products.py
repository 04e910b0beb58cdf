"""Count the scratch bytes of matrix products and attention on the CPU.

Only numbers and tensor metadata go in. Sources: ATen's `FlashAttentionKernel.cpp`, `LinearAlgebra.cpp` and
`mkldnn/Matmul.cpp`; what oneDNN takes was measured. Convolutions are in `scratch.convolution`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chunkc.passes.memory.scratch.copies import LOW_PRECISION, contiguous_copy_nbytes, nbytes_of
from chunkc.torch_private import onednn

# oneDNN works on blocks of 64 columns at most, and each thread packs what its share of a 2 MiB cache holds.
_BLOCK = 64
_CACHE_NBYTES = 2 << 20
_THREAD_NBYTES = 16 << 10


def _padded(size: int, block: int = _BLOCK) -> int:
    return -(-size // block) * block


def uses_onednn(dtype: torch.dtype) -> bool:
    """Whether matrix products in `dtype` may run in oneDNN, with scratch from torch's allocator."""
    return dtype in LOW_PRECISION or (dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest")


def gemm_nbytes(
    dtype: torch.dtype, rows: int, inner: int, columns: int, num_threads: int, *, num_products: int = 1
) -> int:
    """Bound the bytes for packing and accumulating products `[rows, inner] @ [inner, columns]`.

    Full-precision products run in BLAS, which allocates by itself. oneDNN's are bounded per thread by all
    three matrices (padded, accumulated in float32), by what it keeps in a cache, or if a product has one block of rows
    or columns, by that and four blocks of the others. Where it emulates low precision, it accumulates whole products,
    one for each thread.
    """
    if not uses_onednn(dtype):
        return 0
    m, k, n = _padded(rows), _padded(inner), _padded(columns)
    whole = dtype.itemsize * (m * k + k * n) + 4 * m * n
    blocked = _CACHE_NBYTES + 2 * dtype.itemsize * _BLOCK * k
    if min(m, n) == _BLOCK:
        blocked = min(blocked, dtype.itemsize * 5 * _BLOCK * k + 4 * 4 * _BLOCK**2)
    nbytes = num_threads * min(whole, blocked)
    if dtype in LOW_PRECISION and onednn.computes(dtype) and not onednn.multiplies_bfloat16():
        nbytes = max(nbytes, min(num_products, num_threads) * 4 * rows * columns)
    return nbytes + num_threads * _THREAD_NBYTES


def operand_copy_nbytes(operand: Tensor) -> int:
    """Count the bytes of a matrix product's copy of an operand with strides that its library cannot take."""
    if operand.dim() < 2 or uses_onednn(operand.dtype):
        dense = operand.is_contiguous() or (operand.dim() >= 2 and operand.transpose(-1, -2).is_contiguous())
        return 0 if dense else nbytes_of(operand)
    (rows, columns), (row_stride, column_stride) = operand.shape[-2:], operand.stride()[-2:]
    by_rows = column_stride == 1 and row_stride >= max(1, columns)
    by_columns = row_stride == 1 and column_stride >= max(1, rows)
    return 0 if by_rows or by_columns else nbytes_of(operand)


def conjugate_copy_nbytes(factor: Tensor, num_columns: int) -> int:
    """Count the bytes of the copy that the product of two matrices makes of a conjugated factor.

    There is none if BLAS transposes the factor, since it conjugates it then, too.

    Args:
        num_columns: of the product. A product of one column is computed by columns, any other by rows.
    """
    (rows, columns), (row_stride, column_stride) = factor.shape, factor.stride()
    by_rows = column_stride == 1 and row_stride >= max(1, columns)
    by_columns = row_stride == 1 and column_stride >= max(1, rows)
    is_as_computed = by_columns if num_columns == 1 else by_rows
    return nbytes_of(factor) if is_as_computed or not (by_rows or by_columns) else 0


def _attention_blocks(num_queries: int, num_keys: int) -> tuple[int, int]:
    """Return the numbers of queries and of keys that one thread handles at a time."""
    rows = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return min(rows, num_queries), min(512, num_keys)


def _attention_gemm_nbytes(dtype: torch.dtype, rows: int, keys: int, head: int, num_threads: int) -> int:
    shapes = ((keys, head, rows), (head, keys, rows), (head, rows, keys))
    if not uses_onednn(dtype):
        return 0
    # Operands and outputs are strided here, so oneDNN takes buffers for them: 3 times as much was measured.
    return num_threads * max(4 * gemm_nbytes(dtype, *shape, 1) for shape in shapes)


def attention_nbytes(query: Tensor, key: Tensor, num_threads: int) -> int:
    """Count `_scaled_dot_product_flash_attention_for_cpu`: scores, maxima, sums and output per thread."""
    head = query.shape[-1]
    rows, keys = _attention_blocks(query.shape[-2], key.shape[-2])
    accumulated = 8 if query.dtype == torch.float64 else 4
    nbytes = num_threads * accumulated * rows * (keys + 2 + head)
    if query.dtype in LOW_PRECISION:
        # float16 may pad keys and heads to blocks where the processor packs it.
        nbytes = num_threads * accumulated * rows * (_padded(keys) + 2 + _padded(head))
        nbytes += num_threads * query.itemsize * rows * (keys + 1)
    return nbytes + _attention_gemm_nbytes(query.dtype, rows, keys, head, num_threads)


def attention_backward_nbytes(grad_out: Tensor, query: Tensor, key: Tensor, num_threads: int) -> int:
    """Count the backward: scores and gradient per thread, a row sum per busy thread, a copy of `grad_out`."""
    head = query.shape[-1]
    rows, keys = _attention_blocks(query.shape[-2], key.shape[-2])
    accumulated = 8 if query.dtype == torch.float64 else 4
    num_busy = min(num_threads, query.shape[0] * query.shape[1])
    nbytes = num_threads * accumulated * 2 * rows * keys + num_busy * accumulated * rows
    if query.dtype in LOW_PRECISION:
        nbytes += num_threads * query.itemsize * 2 * rows * keys
    nbytes += contiguous_copy_nbytes(grad_out.transpose(1, 2))
    return nbytes + _attention_gemm_nbytes(query.dtype, rows, keys, head, num_threads)
