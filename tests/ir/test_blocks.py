"""What a rank has of a tensor lies in runs of it; parts over ranks are PyTorch's own."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkc.ir.blocks import block_of
from chunkc.ir.shards import Shards

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


DRAWN_SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@given(DRAWN_SHAPES, st.integers(1, 5))
def test_parts_are_those_of_torch_chunk(shape: tuple[int, ...], num_ranks: int) -> None:
    """By which `Shard(0)` is defined; ranks beyond the last part have none."""
    whole = torch.arange(torch.empty(shape).numel()).view(shape)
    chunks = [chunk.flatten() for chunk in torch.chunk(whole, num_ranks)]
    chunks += [whole.flatten()[:0]] * (num_ranks - len(chunks))
    shards = Shards(shape, num_ranks, 0)
    for rank, chunk in enumerate(chunks):
        begin, end = shards.span(rank)
        assert torch.equal(whole.flatten()[begin:end], chunk)
        assert end - begin <= shards.largest_numel
    assert shards.numel == whole.numel()
    assert shards.stride == whole.stride()
