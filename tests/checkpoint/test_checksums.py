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


@pytest.mark.parametrize("seed", range(5))
def test_pieces_with_gaps_that_others_fill(seed: int) -> None:
    """As of columns: each rank writes a part of every row."""
    generator = random.Random(seed)
    rows, row_nbytes, cut = generator.randrange(1, 50), 40, generator.randrange(1, 40)
    content = generator.randbytes(rows * row_nbytes)
    whole = []
    for begin, end in ((0, cut), (cut, row_nbytes)):
        runs = [(row * row_nbytes + begin, content[row * row_nbytes :][begin:end]) for row in range(rows)]
        one, *others = (Piece(offset, len(run), zlib.crc32(run)) for offset, run in runs)
        for other in others:
            one = one.followed_by(other)
        assert (one.offset_nbytes, one.nbytes) == (begin, rows * (end - begin))
        whole.append(one)
    generator.shuffle(whole)
    assert joined(whole) == File(len(content), zlib.crc32(content))
    with pytest.raises(AssertionError):
        joined(whole[:1])
