from __future__ import annotations

from synthetic import EVENTS, MIB, PLAN, ranked, small

from chunkc.explaining.formats import diff
from chunkc.ir.explanation import Chunks, StepTime


def test_equal_explanations_are_said_to_be_equal() -> None:
    assert diff(small(), small()) == "the two explanations are equal\n"


def test_only_what_changed_has_a_line() -> None:
    text = diff(small(), small(predicted_peak_nbytes=170 * MIB))
    (changed,) = [line for line in text.splitlines() if "MiB" in line]
    assert changed.split()[:6] == ["predicted", "peak", "190.00", "MiB", "170.00", "MiB"]
    assert changed.endswith("-20,971,520 bytes, -10.5 %")
    assert "the plans are the same" in text


def test_times_counts_and_words_are_compared() -> None:
    after = small(
        fits=False,
        chunks=Chunks(size_nbytes=20 * MIB, count=3, resident=0),
        step_time_s=StepTime(total=0.015, compute=0.009, to_device=0.004, to_home=0.002, optimizer=0.001, stall=0.005),
    )
    lines = [line.split() for line in diff(small(), after).splitlines()]
    assert ["fits", "yes", "no"] in lines
    assert ["resident", "chunks", "1", "0", "-1"] in lines
    assert ["step", "12.0", "ms", "15.0", "ms", "+3.00", "ms,", "+25.0", "%"] in lines


def test_ranks_are_counted() -> None:
    assert next(line.split()[:4] for line in diff(small(), ranked()).splitlines() if line.startswith("ranks")) == [
        "ranks",
        "1",
        "4",
        "+3",
    ]


def test_chunks_that_begin_and_cease_to_move_are_named() -> None:
    less, more = small(events=EVENTS[2:]), small()
    assert "moved before, not after: param:1" in diff(more, less)
    assert "moved after, not before: param:1" in diff(less, more)
    assert "moved more or less often: grad:1" in diff(more, small(events=(*EVENTS, EVENTS[5])))


def test_waiting_is_not_moving() -> None:
    stall = EVENTS[1]
    assert "moved" not in diff(small(), small(events=tuple(event for event in EVENTS if event != stall)))


def test_plans_are_compared_line_by_line() -> None:
    text = diff(small(), small(plan_text=PLAN.replace("    prefetch(param:1)\n", "")))
    assert [line for line in text.splitlines() if line.startswith("-") and "---" not in line] == [
        "-    prefetch(param:1)"
    ]


def test_a_difference_outside_the_summary_is_no_equality() -> None:
    text = diff(small(), small(notes=()))
    assert "equal" not in text
    assert "all numbers of the summary are the same" in text
