"""Twins: what an update has written is at home once it is adopted, and home is as it was once it is dropped."""

from __future__ import annotations

import pytest
import torch
from harness import differences

from chunkc.ir.layout import GRAD, PARAM, Chunk, ParamSpec
from chunkc.passes.planning.layout import lay_out
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.homes import MemoryHome
from chunkc.runtime.store.shadow_copies import Twins

LAYOUT = lay_out([ParamSpec("w", (256,), (1,), torch.float32, True)], 1024)
HERE = Chunk(PARAM, 0)


def made() -> tuple[Arena, Twins]:
    arena = Arena(MemoryHome())
    arena.reserve({Chunk(kind, 0): LAYOUT.groups[0].nbytes(kind) for kind in LAYOUT.groups[0].update_kinds})
    twins = Twins(arena)
    assert not twins.has(LAYOUT, 0)
    before = arena.nbytes
    twins.reserve(LAYOUT, [0])
    twins.reserve(LAYOUT, [0])
    assert twins.has(LAYOUT, 0)
    assert arena.nbytes - before == sum(LAYOUT.groups[0].nbytes(k) for k in LAYOUT.groups[0].update_kinds if k != GRAD)
    return arena, twins


def home_of(arena: Arena) -> torch.Tensor:
    return arena.host_view(HERE, torch.float32, 256).clone()


@pytest.mark.parametrize("copied", [(), (PARAM,)])
def test_what_is_adopted_is_at_home(copied: tuple[str, ...]) -> None:
    arena, twins = made()
    address = arena.address(HERE)
    for step in range(1, 4):
        twins.begin(0)
        assert twins.takes(HERE)
        assert not twins.takes(Chunk(GRAD, 0))
        before = home_of(arena)
        for begin in (0, 128):
            twins.writer(HERE, begin * 4, torch.full((128,), float(step)))()
        assert not differences([home_of(arena)], [before])
        assert twins.written(0) == {PARAM}
        twins.adopt(LAYOUT, 0, copied=copied)
        assert not twins.takes(HERE)
        assert bool((home_of(arena) == step).all())
        assert (arena.address(HERE) == address) == (bool(copied) or step % 2 == 0)


def test_what_is_dropped_was_never_there() -> None:
    arena, twins = made()
    for step in range(1, 4):
        twins.begin(0)
        twins.flat(LAYOUT, 0, [PARAM])[PARAM].fill_(float(step))
        twins.drop(0)
        assert not twins.takes(HERE)
        assert bool((home_of(arena) == 0).all())


def test_room_goes_with_its_chunk() -> None:
    arena, twins = made()
    arena.free(arena.chunks)
    assert arena.nbytes == 0
    assert not twins.has(LAYOUT, 0)
