"""Values within a function's reach: the nearest come first, and lists among them are not copied."""

from __future__ import annotations

import tracemalloc
from itertools import islice

from torch import nn

from chunkc.utils.reach import within_reach

NUMBERS = [float(number) for number in range(100_000)]
MODEL = nn.Linear(2, 2)


def function(x: float) -> object:
    return MODEL, NUMBERS[0] + x


def test_a_module_comes_before_the_items_of_a_long_list() -> None:
    for names in ({"NUMBERS": NUMBERS, "MODEL": MODEL}, {"MODEL": MODEL, "NUMBERS": NUMBERS}):
        nearest = list(islice(within_reach(function.__code__, [NUMBERS, (MODEL,)], names), 10))
        assert any(value is MODEL for value in nearest)


def test_a_long_list_is_not_copied() -> None:
    tracemalloc.start()
    try:
        nearest = list(islice(within_reach(function.__code__, [], {"NUMBERS": NUMBERS}), 100))
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(nearest) == 100
    assert peak_nbytes < 100_000
