"""The search for the largest size: right for every growth, and with few plans."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkc.explaining.largest import LIMIT, largest
from chunkc.ir.errors import BudgetError, OptionsError


class Counted:
    """A function that counts how often it is asked, and never twice the same."""

    def __init__(self, function: Callable[[int], int]) -> None:
        self.function, self.asked = function, []

    def __call__(self, size: int) -> int:
        assert size not in self.asked
        self.asked.append(size)
        return self.function(size)


def check(function: Callable[[int], int], budget: int) -> tuple[int, int]:
    """The answer, certified, and how many plans it took."""
    need = Counted(function)
    found = largest(need, budget)
    assert function(found) <= budget < function(found + 1)
    assert {found, found + 1} <= set(need.asked)
    return found, len(need.asked)


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(0, 10**11))
def test_straight_lines_take_a_handful(start: int, slope: int, room: int) -> None:
    room %= slope * (LIMIT - 2)
    found, count = check(lambda size: start + slope * size, start + slope + room)
    assert found == 1 + room // slope
    assert count <= 12


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=300), st.data())
def test_any_growth(steps: list[int], data: st.DataObject) -> None:
    """Sums of arbitrary steps, some of them none at all; beyond them it grows by one."""
    sums = [sum(steps[:i]) for i in range(len(steps) + 1)]

    def need(size: int) -> int:
        return sums[min(size, len(steps))] + max(0, size - len(steps))

    check(need, data.draw(st.integers(need(1), need(1) + 2 * sums[-1])))


@pytest.mark.parametrize(
    "need",
    [
        lambda size: 2 ** min(size, 50) + size,
        lambda size: size**3,
        lambda size: int(1000 * math.log(size) + 1),
        lambda size: size if size < 77_777 else 10**15 + size,
        lambda size: 1000 * math.ceil(size / 1000),
        lambda size: size if size < 4096 else size * 10**6,
        lambda size: 10**9 + size,
    ],
    ids=["exponential", "cubic", "logarithmic", "cliff", "stairs", "kink", "flat"],
)
@settings(max_examples=30)
@given(data=st.data())
def test_no_growth_takes_many(need: Callable[[int], int], data: st.DataObject) -> None:
    """Twice a bisection's, as a bound; a line that misleads must not make it a walk."""
    size = data.draw(st.integers(1, 100_000))
    found, count = check(need, need(size))
    assert found >= size
    assert count <= 2 * math.log2(LIMIT) + 8


def test_minima_that_fall_a_little_end_as_well() -> None:
    """A graph compiled whole and one cut into segments need differently."""
    assert largest(lambda size: 1000 - size if size < 50 else 10**6, 999) == 49


def test_one_does_not_fit() -> None:
    with pytest.raises(BudgetError) as error:
        largest(lambda size: 100 * size, 99)
    assert (error.value.minimum_nbytes, error.value.budget_nbytes) == (100, 99)


def test_a_size_that_makes_no_difference() -> None:
    need = Counted(lambda size: 5)
    with pytest.raises(OptionsError, match="does not limit"):
        largest(need, 10)
    assert len(need.asked) < 30
    assert max(need.asked) <= LIMIT
