"""Decide for the first of several candidates that fits the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from chunkc.ir.errors import BudgetError
from chunkc.policy.host_memory import HostFull

Candidate = TypeVar("Candidate")
Decided = TypeVar("Decided")


def first_that_fits(candidates: Iterable[Candidate], decision_for: Callable[[Candidate], Decided]) -> Decided:
    """Return the decision for the first candidate that fits.

    Raises:
        BudgetError: none fits; the error is that of the candidate that needs the least, and says where the host is too
            full for another.
    """
    refused: list[BudgetError] = []
    full = ""
    try:
        for candidate in candidates:
            try:
                return decision_for(candidate)
            except BudgetError as error:
                refused.append(error)
            except HostFull as error:
                full = str(error)
        raise _least(refused, full)
    finally:
        refused.clear()  # an error keeps this frame; by a local name it would keep itself, and a call's values


def _least(refused: list[BudgetError], full: str) -> BudgetError:
    least = min(refused, key=lambda error: error.minimum_nbytes)
    return replace(least, elsewhere=full) if full else least
