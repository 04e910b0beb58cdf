"""Room at home that is promised takes none until it is used."""

from __future__ import annotations

import pytest
import torch
from store_cases import FullHome

from chunkc.ir.errors import HomeError
from chunkc.ir.layout import GRAD, Chunk
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.homes import MemoryHome

CHUNKS = [Chunk(GRAD, index) for index in range(3)]
SIZES = dict.fromkeys(CHUNKS, 4096)


def promising(home: MemoryHome | None = None) -> Arena:
    arena = Arena(home or MemoryHome())
    arena.promise(SIZES)
    return arena


def test_what_is_promised_takes_no_room() -> None:
    arena = promising()
    assert arena.nbytes == arena.used_nbytes == 0
    for chunk in CHUNKS:
        assert chunk in arena
        assert arena.is_promised(chunk)
        assert arena.is_zero(chunk)
        arena.forget(chunk)
    assert arena.chunks == tuple(CHUNKS)
    arena.free(CHUNKS)
    assert not arena.chunks


def test_whoever_writes_or_reads_it_finds_room() -> None:
    arena, values = promising(), torch.arange(1024.0)
    arena.writer(CHUNKS[0], 0, values)()
    assert torch.equal(arena.host_view(CHUNKS[0], torch.float32, 1024), values)
    read = torch.ones(1024)
    arena.reader(CHUNKS[1], 0, read)()
    assert not read.any()
    assert not arena.is_promised(CHUNKS[0])
    assert not arena.is_zero(CHUNKS[0])
    assert arena.is_zero(CHUNKS[1])
    assert arena.nbytes == 2 * 4096
    arena.free(CHUNKS)
    assert arena.nbytes == arena.used_nbytes == 0


def test_promises_are_kept_all_or_none() -> None:
    home = FullHome(2 * 4096)
    arena = promising(home)
    with pytest.raises(HomeError, match="no room"):
        arena.keep_promises(CHUNKS)
    assert arena.nbytes == 0
    assert all(map(arena.is_promised, CHUNKS))
    home.free_nbytes = 3 * 4096
    arena.keep_promises(CHUNKS)
    arena.keep_promises(CHUNKS)
    assert arena.nbytes == 3 * 4096
