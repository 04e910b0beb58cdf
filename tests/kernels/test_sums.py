"""Sums of squares: exact to fp64's rounding, and the same bits wherever a row lies and whoever adds up beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreting import interpret, needs_gpu, needs_triton
from torch import Tensor

from chunkc.ir.sums import ROW, num_rows, rows_of
from chunkc.kernels import sums_cpu, sums_triton

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
NUMELS = (1, 255, 256, 257, ROW, ROW + 1, 2 * ROW + 777)
NUM_ELEMENTS = 300_000


def elements(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(NUM_ELEMENTS, generator=generator) * 3).to(dtype).to(device)


def sums_of(sum_squares: Any, base: Tensor, places: list[tuple[int, int]]) -> Tensor:
    rows = torch.from_numpy(rows_of(places)).to(base.device)
    sums = torch.full((len(rows),), -1.0, dtype=torch.float64, device=base.device)
    sum_squares(base, rows, sums)
    return sums.cpu()


def expected(base: Tensor, begin: int, numel: int) -> Tensor:
    return torch.stack([part.double().square().sum() for part in base[begin : begin + numel].cpu().split(ROW)])


@pytest.mark.parametrize("name", DTYPES)
def test_each_row_is_summed_up_by_itself(name: str) -> None:
    base = elements(DTYPES[name])
    for numel in NUMELS:
        alone = sums_of(sums_cpu.sum_squares, base, [(0, numel)])
        torch.testing.assert_close(alone, expected(base, 0, numel), rtol=1e-12, atol=0)
        assert len(alone) == num_rows(numel)
        elsewhere = torch.cat([torch.ones(3, dtype=base.dtype), base])
        beside = sums_of(sums_cpu.sum_squares, elsewhere, [(0, 2), (3, numel), (3, ROW)])
        assert torch.equal(beside[1 : 1 + len(alone)], alone)


def test_no_number_of_threads_changes_a_bit() -> None:
    base, before = elements(FP32), torch.get_num_threads()
    try:
        found = []
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            found.append(sums_of(sums_cpu.sum_squares, base, [(0, NUM_ELEMENTS)]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_base_may_lie_behind_its_rows() -> None:
    base = elements(FP32)
    found = sums_of(sums_cpu.sum_squares, base[1000:], [(-1000, 500)])
    torch.testing.assert_close(found, expected(base, 0, 500), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", DTYPES)
def test_a_sum_is_finite_if_each_element_is(name: str) -> None:
    dtype = DTYPES[name]
    base = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert sums_of(sums_cpu.sum_squares, base, [(0, 1000)]).isfinite().all()
    tiny = torch.full((1000,), torch.finfo(dtype).smallest_normal / 2, dtype=dtype)
    assert sums_of(sums_cpu.sum_squares, tiny, [(0, 1000)]) > 0
    for value in (float("inf"), float("-inf"), float("nan")):
        base[997] = value
        assert not sums_of(sums_cpu.sum_squares, base, [(0, 1000)]).isfinite().any()


PLACES = [(0, 1), (16, 255), (288, 1024), (1313, 3000), (4320, 5000), (9328, ROW + 17)]
"""Some begin where vectors can be read, some do not."""


def by_triton(device: str) -> dict[str, list[float]]:
    found = {name: sums_of(sums_triton.sum_squares, elements(d, device), PLACES) for name, d in DTYPES.items()}
    base, far = torch.zeros(1, device=device), elements(FP32, device)  # of two sizes: far apart in memory
    distance = (far.data_ptr() - base.data_ptr()) // far.itemsize
    found["far"] = sums_of(sums_triton.sum_squares, base, [(distance, 1000)])
    return {name: sums.tolist() for name, sums in found.items()}


def interpreted(name: str) -> dict[str, list[float]]:
    return by_triton("cpu")


def check_triton(found: dict[str, list[float]]) -> None:
    far = torch.tensor(found.pop("far"), dtype=torch.float64)
    torch.testing.assert_close(far, expected(elements(FP32), 0, 1000), rtol=1e-12, atol=0)
    for name, sums in found.items():
        wanted = torch.cat([expected(elements(DTYPES[name]), *place) for place in PLACES])
        torch.testing.assert_close(torch.tensor(sums, dtype=torch.float64), wanted, rtol=1e-12, atol=0)


@pytest.mark.second_tier
@needs_triton
def test_interpreted() -> None:
    check_triton(interpret(__file__))


@needs_triton
@needs_gpu
def test_on_gpu() -> None:
    found = by_triton("cuda")
    check_triton(found)
    base = elements(BF16, "cuda")
    shifted = torch.cat([torch.zeros(5, dtype=BF16, device="cuda"), base])
    places = [(0, ROW + 17)], [(5, ROW + 17)]
    aligned, ragged = (sums_of(sums_triton.sum_squares, b, p) for b, p in zip((base, shifted), places, strict=True))
    assert torch.equal(aligned, ragged)


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted")
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_device_code_reads_vectors_and_spills_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offline import compile_offline, spilled, vector_accesses

    from chunkc.kernels.elementwise_triton import launch_options
    from chunkc.kernels.sums_triton_kernel import sum_squares_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    base, rows = elements(DTYPES[name]), torch.from_numpy(rows_of([(0, ROW)]))
    arguments = sums_triton.arguments(base, rows, torch.zeros(1, dtype=torch.float64))
    kernel = compile_offline(sum_squares_kernel, arguments, "sm_90", launch_options("cuda", 32))
    assert not any(spilled(kernel, tmp_path).values())
    assert vector_accesses(kernel)["ld16"] >= DTYPES[name].itemsize * 8 // 16
    assert "atom" not in kernel.asm["ptx"]
