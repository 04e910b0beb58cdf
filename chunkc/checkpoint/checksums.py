"""The CRC-32 of bytes of which several ranks know a part each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from chunkc.checkpoint.manifest import File

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1: bits are reflected, so the highest one is the coefficient of x^0."""


@dataclass(frozen=True)
class Piece:
    """Bytes of a file that were written, in order: where they begin, how many they are, and their CRC-32.

    Attributes:
        gaps_nbytes: between them, which others write. They count as what adds nothing to the file's CRC.
    """

    offset_nbytes: int
    nbytes: int
    crc32: int
    gaps_nbytes: int = 0

    @property
    def end_nbytes(self) -> int:
        return self.offset_nbytes + self.nbytes + self.gaps_nbytes

    def followed_by(self, other: Piece) -> Piece:
        """Join this range with one that ends later, maybe with a gap between them."""
        nbytes = self.nbytes + other.nbytes
        return Piece(self.offset_nbytes, nbytes, _sum(self, other), other.end_nbytes - self.offset_nbytes - nbytes)


def joined(pieces: Iterable[Piece]) -> File:
    """The file that pieces make up, without a gap."""
    total = Piece(0, 0, 0)
    for piece in sorted(pieces, key=lambda piece: piece.end_nbytes):
        total = total.followed_by(piece)
    assert total.gaps_nbytes == 0, "there is a gap, or bytes were written twice"
    return File(total.nbytes, total.crc32)


def _sum(one: Piece, later: Piece) -> int:
    """The CRC of two pieces, of which one ends later.

    The CRC of two runs of bytes is that of the first, times x^(8 n) for n bytes that follow, plus that of the second
    (`crc32_combine` of zlib, which Python does not have). So that of a file is the sum of what each piece adds to it.
    """
    return _product(_power_of_x(8 * (later.end_nbytes - one.end_nbytes)), one.crc32) ^ later.crc32


@lru_cache(maxsize=1 << 16)
def _power_of_x(exponent: int) -> int:
    """x^exponent modulo the polynomial."""
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square = _product(square, square)
        exponent >>= 1
    return power


def _product(one: int, other: int) -> int:
    """The product of two polynomials over the integers modulo 2, modulo the polynomial."""
    total = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            total ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return total
