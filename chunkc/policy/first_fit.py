"""The first of several ways that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from chunkc.ir.errors import BudgetError
from chunkc.policy.host_memory import HostFull

Tried = TypeVar("Tried")
Found = TypeVar("Found")


def first_that_fits(ways: Iterable[Tried], decided: Callable[[Tried], Found]) -> Found:
    """What follows from the first way that fits.

    Raises:
        BudgetError: none does; it is that of the way that needs the least, and says where the host is too full for
            another.
    """
    refused: list[BudgetError] = []
    full = ""
    for way in ways:
        try:
            return decided(way)
        except BudgetError as error:
            refused.append(error)
        except HostFull as error:
            full = str(error)
    try:
        least = min(refused, key=lambda error: error.minimum_nbytes)
        raise least.with_alternative(full) if full else least
    finally:
        refused.clear()  # an error keeps this frame, and would keep itself
