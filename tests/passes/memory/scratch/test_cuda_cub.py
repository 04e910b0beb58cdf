"""Bytes that CUB asks for: as PyTorch 2.13 for CUDA 13 asked for them on the GPU made of RAM, by compute capability."""

from __future__ import annotations

import pytest

from chunkc.passes.memory.scratch import cuda_cub

TURING, AMPERE, RTX_30, HOPPER = (7, 5), (8, 0), (8, 6), (9, 0)


@pytest.mark.parametrize(
    ("num", "key", "value", "num_bits", "capability", "nbytes"),
    [
        (2304, 8, 8, 64, HOPPER, 1),
        (3073, 8, 8, 8, HOPPER, 3583),
        (3073, 8, 8, 17, HOPPER, 57_343),
        (4097, 4, 8, 32, HOPPER, 59_391),
        (5000, 2, 8, 16, HOPPER, 56_063),
        (100_000, 1, 8, 8, HOPPER, 32_255),
        (5000, 4, 4, 9, HOPPER, 46_079),
        (3_000_000, 8, 8, 17, HOPPER, 48_674_303),
        (3_000_000, 8, 8, 8, HOPPER, 670_207),
        (3_000_000, 8, 8, 8, RTX_30, 803_327),
        (3_000_000, 8, 8, 8, AMPERE, 803_327),
        (3_000_000, 8, 8, 8, TURING, 1_094_143),
        (3_000_000, 4, 4, 8, AMPERE, 473_599),
        (3_000_000, 4, 4, 8, TURING, 263_679),
    ],
)
def test_sorted_pairs(num: int, key: int, value: int, num_bits: int, capability: tuple[int, int], nbytes: int) -> None:
    assert cuda_cub.radix_sort(num, key, value, num_bits, capability) == nbytes
    assert cuda_cub.radix_sort(num, key, value, num_bits, None) >= nbytes


@pytest.mark.parametrize(
    ("capability", "nbytes"), [(TURING, 4_519_423), (AMPERE, 4_519_423), (None, 4_519_423)], ids=str
)
def test_small_keys_are_bounded_where_they_are_sorted_in_the_older_way(
    capability: tuple[int, int] | None, nbytes: int
) -> None:
    """5,000 halves on an A100."""
    assert cuda_cub.radix_sort(5000, 2, 8, 16, capability) >= nbytes


@pytest.mark.parametrize(
    ("num", "key", "capability", "nbytes"),
    [
        (3_000_000, 8, HOPPER, 11_007),
        (3_000_000, 4, HOPPER, 7935),
        (3_000_000, 8, AMPERE, 36_863),
        (3_000_000, 4, AMPERE, 18_175),
        (3_000_000, 8, RTX_30, 151_039),
        (3_000_000, 4, TURING, 69_375),
        (3073, 8, HOPPER, 1279),
    ],
)
def test_unique_keys(num: int, key: int, capability: tuple[int, int], nbytes: int) -> None:
    assert cuda_cub.unique_by_key(num, key, capability) == nbytes <= cuda_cub.unique_by_key(num, key, None)


@pytest.mark.parametrize(
    ("num", "itemsize", "halves", "nbytes"),
    [(1, 4, False, 1023), (1, 8, False, 1279), (1, 2, True, 1279), (1_000_000, 4, False, 5119),
     (1_000_000, 8, False, 18_943), (1_000_000, 2, True, 3327), (3_000_000, 8, False, 54_783)],
)  # fmt: skip
def test_sums_up_to_each(num: int, itemsize: int, halves: bool, nbytes: int) -> None:
    assert cuda_cub.scan(num, itemsize, halves=halves) == nbytes
