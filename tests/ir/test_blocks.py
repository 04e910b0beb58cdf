"""What a rank has of a tensor lies in runs of it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from chunkc.ir.blocks import block_of

CUTS = [
    [],
    [(0, 2)],
    [(1, 2)],
    [(2, 3)],
    [(0, 2), (0, 2)],
    [(1, 2), (0, 2)],
    [(2, 2), (0, 3)],
    [(1, 2), (2, 2), (0, 2)],
]


SHAPES = [(), (1,), (7,), (5, 6), (4, 5, 6), (2, 0, 3)]


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [(shape, cuts) for shape in SHAPES for cuts in CUTS if all(dim < len(shape) for dim, _ in cuts)],
)
def test_runs_are_the_elements_of_the_block(shape: tuple[int, ...], cuts: list[tuple[int, int]]) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    seen: list[int] = []
    for ranks in itertools.product(*(range(num_ranks) for _, num_ranks in cuts)):
        block = block_of(shape, [(*cut, rank) for cut, rank in zip(cuts, ranks, strict=True)], is_first=True)
        expected = whole
        for (dim, num_ranks), rank in zip(cuts, ranks, strict=True):
            chunks = expected.chunk(num_ranks, dim)
            expected = chunks[rank] if rank < len(chunks) else expected.narrow(dim, 0, 0)
        assert torch.equal(whole[block.slices], expected)
        assert block.sizes == tuple(expected.shape)
        assert block.is_whole == (expected.shape == whole.shape)
        found = [element for first in block.runs() for element in range(first, first + block.run_numel)]
        assert found == expected.flatten().tolist()
        seen += found
    assert sorted(seen) == whole.flatten().tolist(), "blocks make up the whole"


def test_runs_are_as_long_as_they_can_be() -> None:
    rows = block_of((8, 6), [(0, 2, 1), (0, 2, 0)], is_first=True)
    assert (list(rows.runs()), rows.run_numel) == ([24], 12)
    columns = block_of((4, 6), [(1, 2, 1), (0, 2, 1)], is_first=True)
    assert (list(columns.runs()), columns.run_numel) == ([15, 21], 3)
