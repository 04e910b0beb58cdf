"""Twins: what an update has written is at home once it is adopted, and home is as it was once it is dropped."""

from __future__ import annotations

import pytest
import torch
from harness import differences

from chunkc.ir.layout import GRAD, PARAM, Chunk, ParamSpec
from chunkc.passes.planning.layout import lay_out
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.homes import MemoryHome
from chunkc.runtime.store.shadow_copies import ShadowCopies

LAYOUT = lay_out([ParamSpec("w", (256,), (1,), torch.float32, True)], 1024)
HERE = Chunk(PARAM, 0)


def made() -> tuple[Arena, ShadowCopies]:
    arena = Arena(MemoryHome())
    arena.reserve({Chunk(kind, 0): LAYOUT.groups[0].nbytes(kind) for kind in LAYOUT.groups[0].update_kinds})
    shadow_copies = ShadowCopies(arena)
    assert not shadow_copies.has(LAYOUT, 0)
    before = arena.nbytes
    shadow_copies.reserve(LAYOUT, [0])
    shadow_copies.reserve(LAYOUT, [0])
    assert shadow_copies.has(LAYOUT, 0)
    assert arena.nbytes - before == sum(LAYOUT.groups[0].nbytes(k) for k in LAYOUT.groups[0].update_kinds if k != GRAD)
    return arena, shadow_copies


def home_of(arena: Arena) -> torch.Tensor:
    return arena.host_view(HERE, torch.float32, 256).clone()


@pytest.mark.parametrize("copied", [(), (PARAM,)])
def test_what_is_adopted_is_at_home(copied: tuple[str, ...]) -> None:
    arena, shadow_copies = made()
    address = arena.address(HERE)
    for step in range(1, 4):
        shadow_copies.begin(0)
        assert shadow_copies.takes(HERE)
        assert not shadow_copies.takes(Chunk(GRAD, 0))
        before = home_of(arena)
        for begin in (0, 128):
            shadow_copies.writer(HERE, begin * 4, torch.full((128,), float(step)))()
        assert not differences([home_of(arena)], [before])
        assert shadow_copies.written(0) == {PARAM}
        shadow_copies.commit(LAYOUT, 0, copied=copied)
        assert not shadow_copies.takes(HERE)
        assert bool((home_of(arena) == step).all())
        assert (arena.address(HERE) == address) == (bool(copied) or step % 2 == 0)


def test_what_is_dropped_was_never_there() -> None:
    arena, shadow_copies = made()
    for step in range(1, 4):
        shadow_copies.begin(0)
        shadow_copies.flat(LAYOUT, 0, [PARAM])[PARAM].fill_(float(step))
        shadow_copies.roll_back(0)
        assert not shadow_copies.takes(HERE)
        assert bool((home_of(arena) == 0).all())


def test_room_goes_with_its_chunk() -> None:
    arena, shadow_copies = made()
    arena.free(arena.chunks)
    assert arena.nbytes == 0
    assert not shadow_copies.has(LAYOUT, 0)
