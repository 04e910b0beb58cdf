"""Calls that sort, index and scatter, and the calls that take other bytes than their rules say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.passes.memory.scratch.cuda import cuda_scratch_nbytes

aten = torch.ops.aten
F32, F16, BF16, I64, I32 = torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32
Call = tuple[Any, tuple[Any, ...]]


def empty(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def indices(*shape: int, dtype: torch.dtype = I64) -> Tensor:
    return empty(*shape, dtype=dtype)


def embeddings(kind: torch.dtype = I64) -> Iterator[Call]:
    """Yield gradients of embeddings, without numbers of weights for which the device's multiprocessors decide."""
    op = aten.embedding_dense_backward.default
    for num, num_weights, width, dtype in (
        (3072, 50_000, 8, F32), (3073, 50_257, 64, BF16), (8192, 1024, 768, F32), (65_536, 255, 1, F32),
        (20_000, 2, 64, F16), (20_000, 20, 64, F32), (100_000, 70_000, 8, F32), (300_000, 50_257, 8, BF16),
    ):  # fmt: skip
        grad = empty(num, width, dtype=dtype)
        for scales in (False, num_weights > 1000):
            yield op, (grad, indices(num, dtype=kind), num_weights, -1, scales)


def places() -> Iterator[Call]:
    """Yield calls that add or write by index."""
    rows, cube = empty(1000, 64), empty(30, 40, 8)
    for num in (1, 128, 2304, 2305, 5000):
        for accumulate in (True, False):
            yield aten.index_put.default, (rows, [indices(num)], empty(num, 64), accumulate)
            yield aten._unsafe_index_put.default, (rows.t(), [None, indices(num)], empty(64, num), accumulate)
            yield aten.index_put.default, (cube, [indices(num, 1), indices(7)], empty(num, 7, 8), accumulate)
    column, row, number = indices(50, 1), indices(1, 60), empty()
    for given in ([column, row], [None, column, row], [column, None, row], [column, row, column], [row.t()]):
        yield aten.index_put.default, (cube, given, number, True)
        yield aten.index_put.default, (cube.transpose(0, 1), [g if g is None else g.int() for g in given], number, True)
        yield aten.index.Tensor, (cube[::2], given)
    image, gradient = empty(2, 32, 8, 8), empty(2, 64, 16, 16)[:, :32]
    yield aten._unsafe_index_put.default, (image, [None, None, indices(16, 1), indices(16)], gradient, True)
    yield aten.index_add.default, (rows, 0, indices(50), empty(50, 64))
    yield aten.index_copy.default, (rows, 1, indices(50), empty(1000, 50))


def sorts() -> Iterator[Call]:
    """Yield sorts and scans."""
    for dtype in (F32, I64, F16, torch.bool):
        for shape in ((1,), (4096,), (4097,), (100_000,), (1_200_000,), (100, 4097), (127, 5000), (130, 5000)):
            yield aten.sort.default, (empty(*shape, dtype=dtype),)
        yield aten.sort.default, (empty(5000, 100, dtype=dtype), 0)
        yield aten.sort.default, (empty(100, 10_000, dtype=dtype)[:, ::2],)
    yield aten.topk.default, (empty(64, 8), 2)
    yield aten.topk.default, (empty(2500, 300).t(), 50)
    for length in (1, 1000, 3_000_000):
        for dtype in (F32, F16, I64, I32):
            yield aten.cumsum.default, (empty(length, dtype=dtype), 0)
        yield aten.cumprod.default, (empty(2 * length, dtype=I32)[::2], 0)
    values = empty(50, 10_000)
    for mask in (values.bool(), values[:1].bool(), values[:, :1].bool()):
        yield aten.masked_scatter.default, (values, mask, values)


FAMILIES: dict[str, Callable[[], Iterator[Call]]] = {
    "embeddings": embeddings,
    "int32": lambda: embeddings(I32),
    "places": places,
    "sorts": sorts,
}


def others(name: str) -> list[str]:
    """List the calls of a family that take more bytes than their rules say, or fewer than half of that.

    But for some KiB, and for keys under 4 bytes some MiB.
    """
    found = []
    for op, args in FAMILIES[name]():
        op(*args)  # what libraries keep is there from now on
        before_nbytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = op(*args)
        peak_nbytes = torch.cuda.max_memory_allocated() - before_nbytes
        made = [t.untyped_storage().nbytes() for t in tree_leaves(results)]
        bound = cuda_scratch_nbytes(op, args, {}, results)
        took = peak_nbytes - sum(map(rounded_nbytes, made))
        if not took <= bound <= 2 * took + (9 << 20 if op is aten.sort.default and args[0].itemsize < 4 else 40 << 10):
            like = [(tuple(t.shape), t.stride(), t.dtype) for t in tree_leaves(args) if isinstance(t, Tensor)]
            found.append(f"{op} took {took:,} of {bound:,} bytes: {like}")
        del results
    return found
