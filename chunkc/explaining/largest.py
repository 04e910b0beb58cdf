"""Find the largest batch size or sequence length that fits a budget, certified by planning it and the next one.

Bytes grow almost linearly with a batch, so the search follows the line through the two sizes that bound the answer and
takes a handful of plans; where the line misleads, it halves the range instead, so that it never takes more than about
twice the plans of a bisection. Both ends of the answer are planned for themselves: no extrapolation decides.
"""

from __future__ import annotations

from collections.abc import Callable

from chunkc.ir.errors import BudgetError, OptionsError

LIMIT = 1 << 24
"""The largest size to try: if it fits, bytes do not depend on the size."""

FARTHEST_JUMP = 64
"""The next size to try is at most this many times the last that fitted."""


def largest(minimum_nbytes: Callable[[int], int], budget_nbytes: int) -> int:
    """Return the largest size with a smallest budget within `budget_nbytes`.

    Args:
        minimum_nbytes: size (from 1) -> smallest budget that works, in bytes; must not fall.

    Raises:
        BudgetError: size 1 does not fit.
        OptionsError: every size up to `LIMIT` fits.
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
        if high >= LIMIT:
            raise OptionsError(f"the budget does not limit this size: {high:,} still fits")
        slope = (need(high) - need(low)) / (high - low)
        next_high = high + int((budget_nbytes - need(high)) / slope) + 1 if slope > 0 else LIMIT
        low, high = high, min(max(2 * high, next_high), FARTHEST_JUMP * high, LIMIT)
    by_line = True
    while high - low > 1:
        before = high - low
        guess = low + before // 2
        if by_line and need(high) > need(low):
            guess = low + int((budget_nbytes - need(low)) * before / (need(high) - need(low)))
        guess = min(max(guess, low + 1), high - 1)
        if need(guess) <= budget_nbytes:
            low = guess
            if by_line and high - low > 1 and need(low + 1) > budget_nbytes:
                high = low + 1
        else:
            high = guess
            if by_line and high - low > 1 and need(high - 1) <= budget_nbytes:
                low = high - 1
        by_line = 2 * (high - low) <= before
    return low
