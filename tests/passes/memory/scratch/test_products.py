"""Matrix products and attention: the table against the allocator, measured to the byte; PyTorch's
`linear_cross_entropy` by chunks: never more bytes than predicted.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from metering import measure

from chunkc.passes.memory.scratch import cpu
from chunkc.passes.memory.scratch.products import gemm_nbytes
from chunkc.torch_private import onednn

pytestmark = pytest.mark.usefixtures("metered")
aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
THREADS = (1, 2, 3)


def check(target, *args, exact: bool = False, threads: tuple[int, ...] = THREADS, **kwargs) -> None:
    """Measured <= table for every number of threads; equal where said to be exact."""
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        measured, outputs = measure(target, args, kwargs)
        predicted = cpu.scratch_nbytes(target, args, kwargs, outputs, num_threads)
        say = f"{target} with {num_threads} threads: measured {measured}, table {predicted}"
        assert measured == predicted if exact else measured <= predicted, say


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """A matrix that is contiguous, or transposed."""
    if layout == "transposed":
        return torch.randn(columns, rows).to(dtype).t()
    return torch.randn(rows, columns).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        (512, 256, 768),
        (512, 1000, 64),
        (64, 64, 4000),
        (4000, 64, 64),
        (64, 4000, 64),
        (64, 240, 1000),
        (1000, 1, 64),
        (2, 1, 9196),
    ],
)
def test_large_low_precision_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inner, columns = shape
    for left in ("contiguous", "transposed"):
        for right in ("contiguous", "transposed"):
            a, b = matrix(rows, inner, dtype, left), matrix(inner, columns, dtype, right)
            check(aten.mm.default, a, b, threads=(1, 2, 16))
            check(aten.mm.out, a, b, out=torch.empty(rows, 2 * columns, dtype=dtype)[:, ::2])


def test_products_of_few_rows_do_not_grow_with_their_columns() -> None:
    few, many = (gemm_nbytes(torch.bfloat16, 2, 240, columns, 1) for columns in (10_000, 1_000_000))
    assert few == many < 1 << 18 or not onednn.multiplies_bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 600, 8, 3000), (2, 600, 33, 3000), (3, 300, 1, 2000), (40, 100, 16, 300)])
def test_wide_results(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Where a processor multiplies no bfloat16, oneDNN sums whole results in float32."""
    num_products, rows, inner, columns = shape
    left = torch.randn(num_products, rows, inner).to(dtype)
    right = torch.randn(num_products, inner, columns).to(dtype)
    check(aten.bmm.default, left, right, threads=(1, 2, 4))
    check(aten.mm.default, left[0], right[0], threads=(1, 2, 4))
    check(aten.addmm.default, right[0, 0], left[0], right[0], threads=(1, 2, 4))


def test_wide_results_of_less_precise_float32() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        for rows, inner, columns in ((64, 200, 64), (600, 33, 3000)):
            check(aten.mm.default, torch.randn(rows, inner), torch.randn(inner, columns))
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products(transposed: bool) -> None:
    tokens, experts = torch.randn(64, 32).bfloat16(), torch.randn(4, 32, 128).bfloat16()
    experts = experts.mT.contiguous().mT if transposed else experts
    ends = torch.tensor([10, 30, 31, 64], dtype=torch.int32)
    check(aten._grouped_mm.default, tokens, experts, ends)
    check(aten._grouped_mm.default, tokens.t(), torch.randn(64, 128).bfloat16(), ends)


ATTENTION = [
    (2, 4, 4, 16, 16, 8), (1, 2, 2, 65, 65, 64), (2, 4, 2, 256, 256, 64), (1, 2, 2, 800, 800, 32),
    (1, 4, 4, 300, 700, 80), (2, 2, 2, 40, 600, 128),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize("shape", ATTENTION)
def test_attention(shape: tuple[int, ...], heads_last: bool, dtype: torch.dtype) -> None:
    batch, heads, kv_heads, queries, keys, size = shape

    def make(num_heads: int, length: int) -> torch.Tensor:
        if heads_last:
            return torch.randn(batch, length, num_heads, size).to(dtype).transpose(1, 2)
        return torch.randn(batch, num_heads, length, size).to(dtype)

    q, k, v, grad = make(heads, queries), make(kv_heads, keys), make(kv_heads, keys), make(heads, queries)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    exact = dtype == torch.float32
    for mask in (None, torch.zeros(queries, keys, dtype=dtype)):
        causal = mask is None and queries == keys
        out, lse = forward(q, k, v, 0.0, causal, attn_mask=mask)
        check(forward, q, k, v, 0.0, causal, attn_mask=mask, exact=exact)
        check(backward, grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask)
        check(backward, grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, exact=exact, threads=(1,))


SHAPES = ((1, 64, 33, 1), (17, 1, 1000, 1), (17, 100, 33, 2), (64, 16, 7, 16), (5, 3, 130, 5))
"""Rows, their width, classes, rows of a chunk."""


@pytest.mark.parametrize("policy", ["accurate", "balanced", "compact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_chunks_take_no_more_than_predicted(dtype: torch.dtype, policy: str) -> None:
    pytest.importorskip("torch.nn.modules.linear_cross_entropy", reason="PyTorch before 2.13 has no such operators")
    torch.manual_seed(0)
    ops, wrong = torch.ops.torch_nn, []
    for (rows, width, classes, chunk), wanted, weighted in itertools.product(SHAPES, range(8), (False, True)):
        x, weight = torch.randn(rows, width).to(dtype), torch.randn(classes, width).to(dtype)
        bias = torch.randn(classes).to(dtype) if wanted & 4 else None
        given = (x, weight, torch.randint(classes, (rows,)), bias, torch.rand(classes).to(dtype) if weighted else None)
        how, grads = (chunk, policy, torch.float32), (bool(wanted & 1), bool(wanted & 2), bool(wanted & 4))
        scalar = (*given, "mean" if weighted else "sum", -100, 0.0, *how, False, *grads)
        for target, args in (
            (ops._linear_cross_entropy_batch_chunked.default, scalar),
            (ops._linear_cross_entropy_batch_chunked_no_reduction.default, (*given, 1, *how)),
        ):
            measured, results = measure(target, args, {})
            predicted = cpu.scratch_nbytes(target, args, {}, results, torch.get_num_threads())
            if predicted < measured:
                wrong.append(f"{rows} x {width}, {classes} {how} {grads}: measured {measured}, predicted {predicted}")
    assert cpu.is_known(target)
    assert not wrong, "\n".join(wrong[:20])
