"""Sums over rows: of squares, exact to fp64's rounding, and checksums of words, the same on the CPU and by Triton.

A sum has the same bits wherever its row lies, and however many rows are summed up at a time; any write changes a
checksum.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adam_cases import num_threads
from interpreting import interpret, needs_gpu, needs_triton
from offline import compile_offline, spilled, vector_accesses
from torch import Tensor

from chunkc.ir.sums import MIX, PLACE, ROW, num_rows, rows_of
from chunkc.kernels import row_sums_cpu, row_sums_triton
from chunkc.kernels.row_sums import SQUARE

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
        alone = sums_of(row_sums_cpu.sum_squares, base, [(0, numel)])
        torch.testing.assert_close(alone, expected(base, 0, numel), rtol=1e-12, atol=0)
        assert len(alone) == num_rows(numel)
        elsewhere = torch.cat([torch.ones(3, dtype=base.dtype), base])
        together = sums_of(row_sums_cpu.sum_squares, elsewhere, [(0, 2), (3, numel), (3, ROW)])
        assert torch.equal(together[1 : 1 + len(alone)], alone)


def test_no_number_of_threads_changes_a_bit() -> None:
    base, found = elements(FP32), []
    for number in (1, 2, 5):
        with num_threads(number):
            found.append(sums_of(row_sums_cpu.sum_squares, base, [(0, NUM_ELEMENTS)]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_base_may_lie_behind_its_rows() -> None:
    base = elements(FP32)
    found = sums_of(row_sums_cpu.sum_squares, base[1000:], [(-1000, 500)])
    torch.testing.assert_close(found, expected(base, 0, 500), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", DTYPES)
def test_a_sum_is_finite_if_each_element_is(name: str) -> None:
    dtype = DTYPES[name]
    base = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert sums_of(row_sums_cpu.sum_squares, base, [(0, 1000)]).isfinite().all()
    tiny = torch.full((1000,), torch.finfo(dtype).smallest_normal / 2, dtype=dtype)
    assert sums_of(row_sums_cpu.sum_squares, tiny, [(0, 1000)]) > 0
    for value in (float("inf"), float("-inf"), float("nan")):
        base[997] = value
        assert not sums_of(row_sums_cpu.sum_squares, base, [(0, 1000)]).isfinite().any()


WORDS = {"int16": torch.int16, "int32": torch.int32}


def words(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    limits, generator = torch.iinfo(dtype), torch.Generator().manual_seed(0)
    made = torch.randint(limits.min, limits.max, (100_000,), dtype=dtype, generator=generator)
    made[:4] = torch.tensor([limits.min, limits.max, -1, 0])
    return made.to(device)


def checksums_of(checksum: Any, base: Tensor, places: list[tuple[int, int]]) -> list[int]:
    rows = torch.from_numpy(rows_of(places)).to(base.device)
    sums = torch.full((len(rows),), -1, dtype=torch.int64, device=base.device)
    checksum(base, rows, sums)
    return sums.tolist()


def expected_checksums(base: Tensor, begin: int, numel: int) -> list[int]:
    found = []
    for row in base[begin : begin + numel].cpu().split(ROW):
        places = np.arange(len(row), dtype=np.uint32)
        x = row.numpy().astype(np.int32).view(np.uint32) ^ (places * np.uint32(PLACE))
        x = (x ^ (x >> np.uint32(16))) * np.uint32(MIX[0])
        x = (x ^ (x >> np.uint32(13))) * np.uint32(MIX[1])
        found.append(int((x ^ (x >> np.uint32(16))).astype(np.uint64).sum()))
    return found


@pytest.mark.parametrize("name", WORDS)
def test_each_row_has_the_checksum_of_its_words(name: str) -> None:
    base = words(WORDS[name])
    for place in PLACES:
        assert checksums_of(row_sums_cpu.checksums, base, [place]) == expected_checksums(base, *place)
    found = checksums_of(row_sums_cpu.checksums, base, PLACES)
    assert found == [checksum for place in PLACES for checksum in expected_checksums(base, *place)]


@pytest.mark.parametrize("name", WORDS)
def test_every_write_changes_it(name: str) -> None:
    base, place = words(WORDS[name]), [(5, 4000)]
    before = checksums_of(row_sums_cpu.checksums, base, place)
    for index in (5, 17, 4004):
        for bit in (0, 7, 15):
            written = base.clone()
            written[index] ^= (1 << bit) if bit < 15 else torch.iinfo(base.dtype).min
            assert checksums_of(row_sums_cpu.checksums, written, place) != before
    swapped = base.clone()
    swapped[[5, 6]] = base[[6, 5]]
    for written in (swapped, base.roll(1), torch.zeros_like(base), base.flip(0)):
        assert checksums_of(row_sums_cpu.checksums, written, place) != before
    beyond = base.clone()
    beyond[[4, 4005]] ^= 1
    assert checksums_of(row_sums_cpu.checksums, beyond, place) == before


PLACES = [(0, 1), (16, 255), (288, 1024), (1313, 3000), (4320, 5000), (9328, ROW + 17)]
"""Some begin where vectors can be read, some do not."""


def by_triton(device: str) -> dict[str, Any]:
    sum_squares, checksums = row_sums_triton.sum_squares, row_sums_triton.checksums
    found = {name: sums_of(sum_squares, elements(d, device), PLACES).tolist() for name, d in DTYPES.items()}
    base, far = torch.zeros(1, device=device), elements(FP32, device)  # of two sizes: far apart in memory
    distance = (far.data_ptr() - base.data_ptr()) // far.itemsize
    found["far"] = sums_of(sum_squares, base, [(distance, 1000)]).tolist()
    return found | {name: checksums_of(checksums, words(d, device), PLACES) for name, d in WORDS.items()}


def interpreted(name: str) -> dict[str, Any]:
    return by_triton("cpu")


def check_triton(found: dict[str, Any]) -> None:
    wanted = {name: [expected(elements(d), *place) for place in PLACES] for name, d in DTYPES.items()}
    wanted["far"] = [expected(elements(FP32), 0, 1000)]
    for name, sums in wanted.items():
        computed = torch.tensor(found.pop(name), dtype=torch.float64)
        torch.testing.assert_close(computed, torch.cat(sums), rtol=1e-12, atol=0)
    for name, checksums in found.items():
        assert checksums == [c for place in PLACES for c in expected_checksums(words(WORDS[name]), *place)]


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
    aligned, ragged = (sums_of(row_sums_triton.sum_squares, b, p) for b, p in zip((base, shifted), places, strict=True))
    assert torch.equal(aligned, ragged)


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted")
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_device_code_reads_vectors_and_spills_nothing(name: str, tmp_path: Path) -> None:
    from chunkc.kernels.row_sums_triton_kernel import row_sums_kernel

    base, rows = elements(DTYPES[name]), torch.from_numpy(rows_of([(0, ROW)]))
    arguments = row_sums_triton.arguments(SQUARE, base, rows, torch.zeros(1, dtype=torch.float64))
    kernel = compile_offline(row_sums_kernel, arguments, "sm_90", tmp_path)
    assert not any(spilled(kernel, tmp_path).values())
    assert vector_accesses(kernel)["ld16"] >= DTYPES[name].itemsize * 8 // 16
    assert "atom" not in kernel.asm["ptx"]
