"""Expressions evaluated together are what each of them is."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloatTrueDiv, FloorDiv, Max, Mod, ToFloat

from chunkc.passes.graphs.expressions import Expressions, compiled

A, B = sympy.symbols("a b", integer=True, positive=True)
SIZES = [
    0,
    7,
    A,
    3 * A * (B + 2),
    A**2 * B - 5 * A,
    FloorDiv(A + 63, 64) * 64 * B,
    4 * Max(A, B) + Mod(B, 3),
    B * FloorDiv(A, 7) + B * FloorDiv(A, 7) * A,
]
numbers = st.integers(1, 10**5)


@given(numbers, numbers)
def test_values(a: int, b: int) -> None:
    at = {A: a, B: b}
    found = Expressions(SIZES, [A, B]).at(at)
    assert found == [int(sympy.sympify(size).subs(at)) for size in SIZES]
    assert all(type(size) is int for size in found)


def test_rows_are_the_expressions() -> None:
    known = Expressions(SIZES, [A, B])
    for size, row in zip(SIZES, known.rows, strict=True):
        assert sympy.expand(size - known.expression(row)) == 0


def test_terms_are_shared() -> None:
    assert len(Expressions([k * A * B + k for k in range(1, 100)], [A, B]).terms) == 2


@given(numbers, st.floats(1.0, 1e15))
def test_floats_are_pythons(a: int, rate: float) -> None:
    """Divided as Python divides, to the last bit."""
    seconds = FloatTrueDiv(ToFloat(3 * A), sympy.Float(rate))
    assert compiled([seconds], [A])({A: a}) == (3 * a / rate,)


def test_conditions() -> None:
    holds = compiled([sympy.Lt(A, 10), sympy.Ne(A, 4), sympy.Eq(Mod(A, 2), 0)], [A])
    assert [a for a in range(12) if all(holds({A: a}))] == [0, 2, 6, 8]


def test_parts_of_a_byte_are_refused() -> None:
    with pytest.raises(AssertionError, match="no number of bytes"):
        Expressions([A / 2], [A])
