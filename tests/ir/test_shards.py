"""Parts of a tensor over ranks, against PyTorch's own."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkc.ir.shards import Shards

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@given(SHAPES, st.integers(1, 5))
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
