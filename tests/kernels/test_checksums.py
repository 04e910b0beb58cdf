"""Checksums of rows of words: the same on the CPU and by Triton, and other ones after any write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from interpreting import interpret, needs_gpu, needs_triton
from torch import Tensor

from chunkc.ir.sums import MIX, PLACE, ROW, rows_of
from chunkc.kernels import checksums_cpu, checksums_triton

DTYPES = {"int16": torch.int16, "int32": torch.int32}
PLACES = [(0, 1), (16, 255), (288, 1024), (1313, 3000), (4320, 5000), (9328, ROW + 17)]
"""Some begin where vectors can be read, some do not."""


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


def expected(base: Tensor, begin: int, numel: int) -> list[int]:
    found = []
    for row in base[begin : begin + numel].cpu().split(ROW):
        places = np.arange(len(row), dtype=np.uint32)
        x = row.numpy().astype(np.int32).view(np.uint32) ^ (places * np.uint32(PLACE))
        x = (x ^ (x >> np.uint32(16))) * np.uint32(MIX[0])
        x = (x ^ (x >> np.uint32(13))) * np.uint32(MIX[1])
        found.append(int((x ^ (x >> np.uint32(16))).astype(np.uint64).sum()))
    return found


@pytest.mark.parametrize("name", DTYPES)
def test_each_row_has_the_checksum_of_its_words(name: str) -> None:
    base = words(DTYPES[name])
    for place in PLACES:
        assert checksums_of(checksums_cpu.checksums, base, [place]) == expected(base, *place)
    found = checksums_of(checksums_cpu.checksums, base, PLACES)
    assert found == [checksum for place in PLACES for checksum in expected(base, *place)]


@pytest.mark.parametrize("name", DTYPES)
def test_every_write_changes_it(name: str) -> None:
    base, place = words(DTYPES[name]), [(5, 4000)]
    before = checksums_of(checksums_cpu.checksums, base, place)
    for index in (5, 17, 4004):
        for bit in (0, 7, 15):
            written = base.clone()
            written[index] ^= (1 << bit) if bit < 15 else torch.iinfo(base.dtype).min
            assert checksums_of(checksums_cpu.checksums, written, place) != before
    swapped = base.clone()
    swapped[[5, 6]] = base[[6, 5]]
    for written in (swapped, base.roll(1), torch.zeros_like(base), base.flip(0)):
        assert checksums_of(checksums_cpu.checksums, written, place) != before
    beyond = base.clone()
    beyond[[4, 4005]] ^= 1
    assert checksums_of(checksums_cpu.checksums, beyond, place) == before


def by_triton(device: str) -> dict[str, list[int]]:
    return {name: checksums_of(checksums_triton.checksums, words(d, device), PLACES) for name, d in DTYPES.items()}


def interpreted(name: str) -> dict[str, list[int]]:
    return by_triton("cpu")


def check_triton(found: dict[str, list[int]]) -> None:
    for name, sums in found.items():
        assert sums == [checksum for place in PLACES for checksum in expected(words(DTYPES[name]), *place)]


@pytest.mark.second_tier
@needs_triton
def test_interpreted() -> None:
    check_triton(interpret(__file__))


@needs_triton
@needs_gpu
def test_on_gpu() -> None:
    check_triton(by_triton("cuda"))
