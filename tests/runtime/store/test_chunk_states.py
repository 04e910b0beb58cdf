"""Every transition between chunk states: the seven allowed ones, and all the others raise."""

from __future__ import annotations

from itertools import product

import pytest

from chunkc.ir.errors import ChunkStateError
from chunkc.ir.layout import Chunk
from chunkc.runtime.store.slots import ChunkState, advance

ALLOWED = (
    ("FREE", "PREFETCHING"),  # a slot is taken
    ("PREFETCHING", "HOLD"),  # waited for
    ("HOLD", "COMPUTE"),
    ("COMPUTE", "HOLD"),
    ("HOLD", "EVICTING"),  # written back
    ("EVICTING", "HOLD"),  # waited for
    ("HOLD", "FREE"),  # the slot is given back
)
ILLEGAL = sorted(set(product(ChunkState.__members__, repeat=2)) - set(ALLOWED))


def test_there_are_five_states() -> None:
    assert set(ChunkState.__members__) == {"FREE", "PREFETCHING", "HOLD", "COMPUTE", "EVICTING"}
    assert len(ILLEGAL) == 25 - len(ALLOWED)


@pytest.mark.parametrize(("current", "new"), ALLOWED)
def test_an_allowed_transition_gives_the_new_state(current: str, new: str) -> None:
    assert advance(Chunk("param", 3), ChunkState[current], ChunkState[new]) is ChunkState[new]


@pytest.mark.parametrize(("current", "new"), ILLEGAL)
def test_an_illegal_transition_names_the_chunk_and_both_states(current: str, new: str) -> None:
    with pytest.raises(ChunkStateError, match=rf"^chunk grad:7 .*from {current} to {new}$"):
        advance(Chunk("grad", 7), ChunkState[current], ChunkState[new])
