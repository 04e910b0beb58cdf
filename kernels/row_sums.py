"""Define the terms that are summed up over rows (see `chunkc.ir.sums`): elements, their squares, and mixed words."""

from __future__ import annotations

from chunkc.ir.sums import MIX, PLACE
from chunkc.kernels.arithmetic import Arithmetic, Value


def itself(element: Value, place: Value) -> tuple[Value, ...]:
    """Take an element as it is, in fp64."""
    return (element,)


def square(element: Value, place: Value) -> tuple[Value, ...]:
    """Square an element, in fp64."""
    return (element * element,)


def mixed_word(word: Value, place: Value) -> tuple[Value, ...]:
    """Mix a word with its place in the row, in 32 bits (see `chunkc.ir.sums.Checksum`)."""
    mixed = word ^ (place * PLACE)
    mixed = (mixed ^ (mixed >> 16)) * MIX[0]
    mixed = (mixed ^ (mixed >> 13)) * MIX[1]
    return (mixed ^ (mixed >> 16),)


ITSELF = Arithmetic(itself)
SQUARE = Arithmetic(square)
MIXED_WORD = Arithmetic(mixed_word)
