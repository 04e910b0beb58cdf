"""What every rank has whole: gathered anew once this rank's part at home is not what stands here, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.layout import GRAD, PARAM, Chunk, ChunkGroup, ParamSpec
from chunkc.ir.shards import Shards
from chunkc.passes.planning.layout import lay_out
from chunkc.runtime.device.tier import CpuTier
from chunkc.runtime.store.consumed_gradients import LocalGradient
from chunkc.runtime.store.replicated import Replicated

RANK, ROWS = 1, 10


def group_of(dtype: torch.dtype) -> ChunkGroup:
    """Ten rows over three ranks: rank 1 has four of them."""
    shards = Shards((ROWS,), 3, RANK, 2)
    begin, end = shards.span(RANK)
    spec = ParamSpec("w", (end - begin,), (1,), dtype, trainable=True, shards=shards)
    return lay_out([spec], 1 << 12).groups[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_chunk_is_outdated_once_home_differs(dtype: torch.dtype) -> None:
    group, replicated, tier = group_of(dtype), Replicated(), CpuTier()
    home = torch.zeros(group.numel, dtype=dtype)
    assert replicated.is_outdated(group, home), "nothing was gathered yet"
    room = replicated.room(Chunk(PARAM, 0), group, tier)
    assert room is replicated.room(Chunk(PARAM, 0), group, tier)
    room.fill_(1)
    begin, end = Shards((ROWS,), 3, RANK).span(RANK)
    room[begin:end] = 0
    replicated.current.add(0)
    assert not replicated.is_outdated(group, home), "what other ranks have is for them to see"
    home[end - begin - 1] = -0.0
    assert replicated.is_outdated(group, home), "another sign is another value"
    room[end - 1] = -0.0
    assert not replicated.is_outdated(group, home)
    home[0] = room[begin] = torch.nan
    assert not replicated.is_outdated(group, home), "NaN is equal to itself here"
    replicated.clear()
    assert replicated.is_outdated(group, home)


def test_gradients_wait_until_they_are_exchanged_or_dropped() -> None:
    replicated, kept, dropped = Replicated(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    parameters = {"kept": kept, "dropped": dropped}
    for name, parameter in parameters.items():
        parameter.grad = LocalGradient(parameter, name)
    replicated.waiting[Chunk(GRAD, 0)] = {"kept": False, "dropped": False}
    assert replicated.local_gradients([1], parameters.__getitem__) == []
    assert replicated.local_gradients([0, 1], parameters.__getitem__) == ["dropped", "kept"]
    with pytest.raises(UnsupportedError, match="have not exchanged the gradient of kept yet"):
        nn.utils.clip_grad_norm_([kept], 1.0)
    dropped.grad = None
    assert replicated.local_gradients([0], parameters.__getitem__) == ["kept"]
    assert replicated.waiting[Chunk(GRAD, 0)] == {"kept": False}
