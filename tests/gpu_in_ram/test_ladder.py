"""The end-to-end ladder in its smallest budgets, inside torch's own limit: predicted bytes against those given out.

No arithmetic: memory is exact. The ladder is the CPU's (`zoo.LADDER`), in fp32 but where autocast is.
"""

from __future__ import annotations

import pytest
from device_ladder import NOT_CAPTURED, in_the_smallest_budget
from device_overhead import MOST_LEFT_NBYTES
from zoo import LADDER

import chunkc

CAPTURED = sorted(set(LADDER) - {NOT_CAPTURED})

STEPS = {"sometimes_unused": 6}
"""Where not three, from which on tables are what they stay: the first step updates all, the second updates in its
backward. The branch of this one runs in every other step."""


def unused_nbytes(report: chunkc.Report) -> list[tuple[int, str]]:
    """By moment, what was predicted and not given out."""
    found = [(predicted - measured, label) for label, predicted, measured in report.moments if measured is not None]
    assert len(found) == len(report.moments) > 0
    return found


def test_all_of_the_ladder_is_here() -> None:
    assert len(CAPTURED) == 30


@pytest.mark.parametrize("name", CAPTURED)
def test_eager_code_takes_what_was_predicted_to_the_byte(name: str) -> None:
    """At each moment the same is left: the tables' room."""
    unused = unused_nbytes(in_the_smallest_budget(LADDER[name], steps=STEPS.get(name, 3))[0].report)
    left_nbytes, _ = min(unused)
    assert 0 < left_nbytes <= MOST_LEFT_NBYTES
    assert max(unused)[0] == left_nbytes, sorted(unused)


@pytest.mark.parametrize("name", CAPTURED)
def test_inductor_s_code(name: str) -> None:
    """Each call within 1 %."""
    run, _ = in_the_smallest_budget(LADDER[name], "inductor")
    report = run.report
    unused = unused_nbytes(report)
    left_nbytes, _ = min(unused)
    assert 0 < left_nbytes <= MOST_LEFT_NBYTES
    assert max(unused)[0] - left_nbytes <= 0.01 * report.measured_peak_nbytes, sorted(unused)
