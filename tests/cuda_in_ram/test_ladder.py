"""The end-to-end ladder in its smallest budgets, inside torch's own limit: predicted bytes against those given out.

No arithmetic: memory is exact. The ladder is the CPU's (`zoo.LADDER`), in fp32 but where autocast is.
"""

from __future__ import annotations

import pytest
from device_ladder import MIB, NOT_CAPTURED, in_the_smallest_budget
from zoo import LADDER

import chunkc
from chunkc.machines.devices import TABLES_NBYTES

KIB = 1024

BOUNDED = {
    # What a moment may take less than predicted, by the reason.
    2 * KIB: ("checkpointed_gpt", "sometimes_unused"),
    32 * KIB: ("graph_breaks", "breaks_in_loop"),
    96 * KIB: ("unet",),
    MIB + 32 * KIB: ("mixtral", "whisper", "clip"),
}
"""Where indices are sorted a MiB is set aside for CUB's scratch, and what graphs hand to each other is counted longer
than it is held. Why two models take 1 KiB less, and one 89, nobody has looked into."""

AT_MOST = dict.fromkeys(sorted(set(LADDER) - {NOT_CAPTURED}), 0) | {
    name: nbytes for nbytes, names in BOUNDED.items() for name in names
}


def unused_nbytes(report: chunkc.Report) -> list[tuple[int, str]]:
    """By moment, what was predicted and not given out."""
    found = [(predicted - measured, label) for label, predicted, measured in report.moments if measured is not None]
    assert len(found) == len(report.moments) > 0
    return found


def test_all_of_the_ladder_is_here() -> None:
    assert set(AT_MOST) == set(LADDER) - {NOT_CAPTURED}


@pytest.mark.parametrize("name", AT_MOST)
def test_eager_code(name: str) -> None:
    """No moment takes more than was predicted, and but for what is bounded all leave the same: the tables' room."""
    unused = unused_nbytes(in_the_smallest_budget(LADDER[name])[0].report)
    left_nbytes, _ = min(unused)
    assert 0 < left_nbytes <= TABLES_NBYTES
    assert max(unused)[0] - left_nbytes <= AT_MOST[name], sorted(unused)


@pytest.mark.parametrize("name", AT_MOST)
def test_inductor_s_code(name: str) -> None:
    """Each call within 1 %."""
    run, _ = in_the_smallest_budget(LADDER[name], "inductor")
    report = run.report
    unused = unused_nbytes(report)
    left_nbytes, _ = min(unused)
    assert 0 < left_nbytes <= TABLES_NBYTES
    assert max(unused)[0] - left_nbytes <= 0.01 * report.measured_peak_nbytes, sorted(unused)
