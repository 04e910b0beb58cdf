"""Models of several graphs train in every budget from the smallest on, with the same bits."""

from __future__ import annotations

from functools import cache

import pytest
from harness import HUGE, Result, assert_same_training, train
from zoo import CASES

from chunkc.explaining.explain import minimum_budget

PERCENT = (100, 120, 150, 165, 180, 188, 200, 220, 228, 250, 300)
"""Of the smallest budget. At 180, 188, 220 and 228 residents are in the way of a later graph's backward."""

QUICK = (180,)


@pytest.mark.second_tier
@pytest.mark.parametrize("percent", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in PERCENT])
def test_every_budget_from_the_smallest_on(percent: int) -> None:
    result = trained(smallest_nbytes() * percent // 100)
    assert_same_training(result, trained(HUGE))


@cache
def smallest_nbytes() -> int:
    case = CASES["graph_breaks"]
    return minimum_budget(case.build(), **case.batch(0), memory_budget=1)


@cache
def trained(budget_nbytes: int) -> Result:
    return train(CASES["graph_breaks"], memory_budget=budget_nbytes, place=False, whole_graph="never", limit=False)
