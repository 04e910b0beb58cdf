"""The largest batch size or sequence length that fits a budget: certified by planning it and the next one.

Bytes grow almost linearly with a batch, so the search follows the line through the two sizes that bound the answer and
takes a handful of plans. Both ends of the answer are planned for themselves: no extrapolation decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chunkc.ir.errors import BudgetError


@dataclass(frozen=True)
class Largest:
    """The largest size that fits. `needs_nbytes`: the smallest budgets of `size` and of `size + 1`."""

    size: int
    needs_nbytes: tuple[int, int]


def largest(minimum_nbytes: Callable[[int], int], budget_nbytes: int) -> Largest:
    """The largest size whose smallest budget is within `budget_nbytes`.

    Args:
        minimum_nbytes: size (from 1) -> smallest budget that works, in bytes; must not fall.

    Raises:
        BudgetError: size 1 does not fit.
    """
    known: dict[int, int] = {}

    def need(size: int) -> int:
        if size not in known:
            known[size] = minimum_nbytes(size)
        return known[size]

    if need(1) > budget_nbytes:
        raise BudgetError(
            minimum_nbytes=need(1), budget_nbytes=budget_nbytes, moment="any size", module="", contents=[]
        )
    low, high = 1, 2
    while need(high) <= budget_nbytes:
        slope = max(1, (need(high) - need(low)) // (high - low))
        low, high = high, max(2 * high, high + (budget_nbytes - need(high)) // slope + 1)
    while high - low > 1:
        slope = max(1.0, (need(high) - need(low)) / (high - low))
        guess = low + int((budget_nbytes - need(low)) / slope)
        guess = min(max(guess, low + 1), high - 1)
        if need(guess) <= budget_nbytes:
            low = guess
            if high - low > 1 and need(low + 1) > budget_nbytes:
                high = low + 1
        else:
            high = guess
            if high - low > 1 and need(high - 1) <= budget_nbytes:
                low = high - 1
    return Largest(low, (need(low), need(high)))
