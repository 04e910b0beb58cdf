"""The search for the quickest way in which values may be absent."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from chunkc.absences import quickest
from chunkc.ir.items import Absence


@pytest.mark.parametrize("seed", range(50))
def test_giving_up_slow_ways_changes_nothing_but_the_work(seed: int) -> None:
    """However few ways are timed to the end, the search goes the same steps and finds the same one."""
    rng = random.Random(seed)
    ways = {(m, k): Absence(frozenset({str((m, k))})) for m in range(20) for k in range(17)}
    known = {absent: rng.choice([None, *map(float, range(1, 9))]) for absent in ways.values()}
    mixes: Any = SimpleNamespace(most=(19, 16), at=lambda *place: ways[place])
    tried: list[list[Absence]] = [[], []]
    num_given_up = 0

    def patient(absent: Absence, most_s: float) -> tuple[float, Absence] | None:
        tried[0].append(absent)
        seconds = known[absent]
        return None if seconds is None else (seconds, absent)

    def impatient(absent: Absence, most_s: float) -> tuple[float, Absence] | None:
        nonlocal num_given_up
        tried[1].append(absent)
        seconds = known[absent]
        if seconds is not None and seconds > most_s:
            num_given_up += 1
            return math.inf, absent
        return None if seconds is None else (seconds, absent)

    assert quickest(mixes, impatient) == quickest(mixes, patient)
    assert tried[0] == tried[1]
    assert num_given_up
