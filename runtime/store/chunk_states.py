"""Define the states of a chunk and the transitions between them (after Gemini's and PatrickStar's tensor states)."""

from __future__ import annotations

import enum

from chunkc.ir.errors import ChunkStateError
from chunkc.ir.layout import Chunk


class ChunkState(enum.Enum):
    """State of a chunk. Only HOLD and COMPUTE may be read; only FREE has no slot."""

    FREE = "FREE"
    PREFETCHING = "PREFETCHING"
    HOLD = "HOLD"
    COMPUTE = "COMPUTE"
    EVICTING = "EVICTING"


_ALLOWED = {
    (ChunkState.FREE, ChunkState.PREFETCHING),
    (ChunkState.PREFETCHING, ChunkState.HOLD),
    (ChunkState.HOLD, ChunkState.COMPUTE),
    (ChunkState.COMPUTE, ChunkState.HOLD),
    (ChunkState.HOLD, ChunkState.EVICTING),
    (ChunkState.EVICTING, ChunkState.HOLD),
    (ChunkState.HOLD, ChunkState.FREE),
}


def advance(chunk: Chunk, current: ChunkState, new: ChunkState) -> ChunkState:
    """Return `new`, if the transition from `current` is allowed.

    Raises:
        ChunkStateError: it is not.
    """
    if (current, new) not in _ALLOWED:
        raise ChunkStateError(f"chunk {chunk} cannot go from {current.value} to {new.value}")
    return new
