"""PyTorch's `linear_cross_entropy` by chunks: never more bytes than predicted."""

from __future__ import annotations

import itertools

import pytest
import torch
from metering import measure

from chunkc.passes.memory.scratch import cpu

pytest.importorskip("torch.nn.modules.linear_cross_entropy", reason="PyTorch before 2.13 has no such operators")
pytestmark = pytest.mark.usefixtures("metered")
SHAPES = ((1, 64, 33, 1), (17, 1, 1000, 1), (17, 100, 33, 2), (64, 16, 7, 16), (5, 3, 130, 5))
"""Rows, their width, classes, rows of a chunk."""


@pytest.mark.parametrize("policy", ["accurate", "balanced", "compact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_chunks_take_no_more_than_predicted(dtype: torch.dtype, policy: str) -> None:
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
