"""Compute the CRC-32 of a file from CRCs of pieces that several ranks have written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from chunkc.checkpoint.manifest import File

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1: bits are reflected, so the highest bit is the coefficient of x^0."""


@dataclass(frozen=True)
class Piece:
    """Bytes that a rank has written to a file, in order of offset, perhaps with gaps.

    Attributes:
        offset_nbytes: of the first byte in the file.
        nbytes: written bytes, without gaps.
        crc32: of the range from the first byte to the last, where gaps add nothing.
        gaps_nbytes: bytes in between, which other ranks write.
    """

    offset_nbytes: int
    nbytes: int
    crc32: int
    gaps_nbytes: int = 0

    @property
    def end_nbytes(self) -> int:
        return self.offset_nbytes + self.nbytes + self.gaps_nbytes

    def followed_by(self, other: Piece) -> Piece:
        """Join this piece with one that ends later; there may be a gap between them."""
        nbytes = self.nbytes + other.nbytes
        return Piece(self.offset_nbytes, nbytes, _sum(self, other), other.end_nbytes - self.offset_nbytes - nbytes)


def joined(pieces: Iterable[Piece]) -> File:
    """Join the pieces of a file, in any order; they must leave no gap."""
    total = Piece(0, 0, 0)
    for piece in sorted(pieces, key=lambda piece: piece.end_nbytes):
        total = total.followed_by(piece)
    assert total.gaps_nbytes == 0, "there is a gap, or bytes were written twice"
    return File(total.nbytes, total.crc32)


def _sum(one: Piece, later: Piece) -> int:
    """Combine the CRCs of a piece and one that ends later.

    CRC(a + b) = CRC(a) * x^(8 n) + CRC(b), where b has n bytes (zlib's `crc32_combine`, which Python lacks). It is
    linear, so a file's CRC is the sum of its pieces' CRCs, each times x^(8 n) for the n bytes from the piece's end to
    the file's end.
    """
    return _product(_power_of_x(8 * (later.end_nbytes - one.end_nbytes)), one.crc32) ^ later.crc32


@lru_cache(maxsize=1 << 16)
def _power_of_x(exponent: int) -> int:
    """Compute x^exponent modulo the CRC's polynomial."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square = _product(square, square)
        exponent >>= 1
    return power


def _product(one: int, other: int) -> int:
    """Multiply two polynomials over GF(2), modulo the CRC's polynomial."""
    total = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            total ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return total
