"""Checksums of pieces, put together, are those of the file."""

from __future__ import annotations

import random
import zlib

import pytest

from chunkc.checkpoint.checksums import Piece, joined
from chunkc.checkpoint.manifest import File


@pytest.mark.parametrize("seed", range(5))
def test_pieces_in_any_order(seed: int) -> None:
    generator = random.Random(seed)
    content = generator.randbytes(generator.randrange(1, 5000))
    ends = [*sorted(generator.choices(range(len(content) + 1), k=generator.randrange(6))), len(content)]
    pieces, begin = [], 0
    for end in ends:  # some are empty
        pieces.append(Piece(begin, end - begin, zlib.crc32(content[begin:end])))
        begin = end
    generator.shuffle(pieces)
    assert joined(pieces) == File(len(content), zlib.crc32(content))


def test_a_gap_and_an_overlap_are_found() -> None:
    whole = Piece(0, 4, zlib.crc32(b"abcd"))
    for other in (Piece(5, 1, 1), Piece(3, 1, 1)):
        with pytest.raises(AssertionError):
            joined([whole, other])
