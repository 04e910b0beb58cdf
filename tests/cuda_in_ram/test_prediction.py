"""Predicted bytes against those that torch's allocator gave out, by PyTorch's own CUDA host code. No arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_gpt import MEDIUM, smallest_budget, train

import chunkc
from chunkc.machines.devices import TABLES_NBYTES
from chunkc.passes.cuda_memory import rounded_nbytes
from chunkc.passes.scratch.cuda_reduction import reduces_fastest, reduction_nbytes

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def unused_nbytes(report: chunkc.Report) -> dict[str, int]:
    """By moment, what was predicted and not taken."""
    found = {label: predicted - measured for label, predicted, measured in report.moments if measured is not None}
    assert len(found) == len(report.moments) > 0
    return found


@DTYPES
def test_eager_code_takes_what_was_predicted_to_the_byte(dtype: torch.dtype) -> None:
    """At every moment, with the smallest budget: but for the same bytes at each, what is left of the tables' room."""
    budget_nbytes = smallest_budget(MEDIUM, dtype, batch=4)
    report = train(MEDIUM, dtype, budget_nbytes, batch=4, keep=True).report
    (left_nbytes,) = set(unused_nbytes(report).values())
    assert 0 < left_nbytes <= TABLES_NBYTES
    assert report.predicted_peak_nbytes <= budget_nbytes


@pytest.mark.parametrize("activations", ["offload", "rerun"])
def test_nor_more_where_saved_values_are_absent(activations: str) -> None:
    budget_nbytes = smallest_budget(MEDIUM, torch.bfloat16, batch=4, activations=activations)
    report = train(MEDIUM, torch.bfloat16, budget_nbytes, batch=4, keep=True, activations=activations).report
    (left_nbytes,) = set(unused_nbytes(report).values())
    assert 0 < left_nbytes <= TABLES_NBYTES


def test_nor_more_where_losses_are_in_tiles() -> None:
    tiles = {"batch": 4, "loss_tile_rows": 256}
    budget_nbytes = smallest_budget(MEDIUM, torch.bfloat16, **tiles)
    assert budget_nbytes < smallest_budget(MEDIUM, torch.bfloat16, batch=4)
    report = train(MEDIUM, torch.bfloat16, budget_nbytes, keep=True, **tiles).report
    (left_nbytes,) = set(unused_nbytes(report).values())
    assert 0 < left_nbytes <= TABLES_NBYTES


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_nor_more_under_autocast(home: str) -> None:
    """At every moment, in eager code."""
    how: dict[str, Any] = {"batch": 4, "autocast": torch.bfloat16, "home": home}
    budget_nbytes = smallest_budget(MEDIUM, torch.float32, **how)
    assert budget_nbytes < smallest_budget(MEDIUM, torch.float32, batch=4)
    report = train(MEDIUM, torch.float32, budget_nbytes, keep=True, **how).report
    (left_nbytes,) = set(unused_nbytes(report).values())
    assert 0 < left_nbytes <= TABLES_NBYTES


@DTYPES
def test_norms_are_taken_in_slots_and_no_gradient_is_read(dtype: torch.dtype) -> None:
    """But for the first step's, before which nobody has asked. At every moment, to the byte."""
    how: dict[str, Any] = {"batch": 4, "clip": 0.1, "clip_in_step": True}
    budget_nbytes = smallest_budget(MEDIUM, dtype, **how)
    reports = [train(MEDIUM, dtype, budget_nbytes, keep=True, steps=steps, **how).report for steps in (1, 4)]
    (left_nbytes,) = set(unused_nbytes(reports[1]).values())
    assert 0 < left_nbytes <= TABLES_NBYTES
    assert reports[0].gradients_read_nbytes == reports[1].gradients_read_nbytes > 0


@DTYPES
def test_inductor_s_code_takes_hardly_less(dtype: torch.dtype) -> None:
    """At each moment within a thousandth. In fp32, attention's seeds are counted, which are on the CPU."""
    budget_nbytes = smallest_budget(MEDIUM, dtype, batch=4, codegen="inductor")
    report = train(MEDIUM, dtype, budget_nbytes, batch=4, keep=True, codegen="inductor").report
    unused = unused_nbytes(report).values()
    assert 0 < min(unused) <= TABLES_NBYTES
    assert max(unused) - min(unused) < 0.001 * budget_nbytes
    assert report.predicted_peak_nbytes <= budget_nbytes


SHAPES = [
    ((1024, 2048), [0]), ((1024, 2048), [1]), ((4096, 1024), [0]), ((1 << 20,), [0]), ((4, 256, 512), [0, 1]),
    ((4, 256, 512), [2]), ((100_000, 7), [0]), ((100_000, 6), [0]), ((7, 100_000), [1]), ((8, 64, 32, 32), [0, 2, 3]),
    ((2048, 8), [0]), ((3000, 30), [0]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dims"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_reductions_to_the_byte(shape: tuple[int, ...], dims: list[int], dtype: torch.dtype) -> None:
    given = torch.empty(shape, device="cuda", dtype=dtype)
    for op, itemsize in ((torch.sum, 4), (torch.amax, dtype.itemsize), (torch.var_mean, 16)):
        op(given, dims)
        before_nbytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = op(given, dims)
        made = made if isinstance(made, tuple) else (made,)
        taken_nbytes = torch.cuda.max_memory_allocated() - before_nbytes - sum(rounded_nbytes(t.nbytes) for t in made)
        num_outputs = made[0].numel()
        parts = reduction_nbytes(
            num_outputs, given.numel() // num_outputs, over_fastest=reduces_fastest(given, dims), itemsize=itemsize
        )
        assert taken_nbytes == sum(map(rounded_nbytes, parts)), op.__name__
