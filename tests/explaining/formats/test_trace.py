"""The trace obeys the format: what a viewer refuses or draws wrongly is what is checked here."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from synthetic import EVENTS, MIB, event, large, measured, ranked, small

from chunkc.explaining.formats import render_trace
from chunkc.explaining.formats.trace import BUDGET, BY_KIND, IN_USE, MEASURED, PREDICTED
from chunkc.ir.explanation import COMPUTE, Explanation
from chunkc.ir.links import TO_DEVICE


def events_of(explanation: Explanation) -> list[dict[str, Any]]:
    return json.loads(render_trace(explanation))["traceEvents"]


def threads(events: list[dict[str, Any]], pid: int) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}


@pytest.mark.parametrize("explanation", [small(), small(measured=measured()), large(30)], ids=["small", "run", "large"])
def test_it_is_a_valid_trace(explanation: Explanation) -> None:
    events = events_of(explanation)
    timed = [e for e in events if e["ph"] != "M"]
    assert events[: len(events) - len(timed)] == [e for e in events if e["ph"] == "M"], "metadata first"
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for e in timed:
        assert e["ph"] in "XC"
        assert isinstance(e["name"], str)
        assert e["ts"] >= 0
        if e["ph"] == "X":
            assert e["dur"] >= 0
            assert (e["pid"], e["tid"]) in named
        else:
            assert all(isinstance(value, int) for value in e["args"].values())


def test_slices_of_a_thread_never_overlap() -> None:
    together = (event(TO_DEVICE, "prefetch", "param:1", 0, 3, 1), event(TO_DEVICE, "prefetch", "param:2", 1, 2, 1))
    crossing = (*together, event(TO_DEVICE, "prefetch", "param:3", 2.5, 4, 1))
    events = events_of(small(events=crossing))
    slices: dict[int, list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            slices.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    assert sum(map(len, slices.values())) == 3
    assert all(a[1] <= b[0] for spans in slices.values() for a, b in pairwise(sorted(spans)))
    assert "to_device (2)" in threads(events, PREDICTED).values()


def test_times_are_in_microseconds() -> None:
    (call,) = [e for e in events_of(small()) if e["name"] == "backward.0"]
    assert (call["ts"], call["dur"]) == (5000.0, 6000.0)
    assert call["args"]["phase"] == "backward"


def test_every_event_and_moment_is_there() -> None:
    explanation = large(30)
    events = events_of(explanation)
    assert sum(e["ph"] == "X" for e in events) == len(explanation.events)
    for name in (IN_USE, BY_KIND):
        counters = [e for e in events if e["ph"] == "C" and e["name"] == name]
        assert len(counters) == len(explanation.moments) + 1
        assert [sum(e["args"].values()) for e in counters[:-1]] == [m.nbytes for m in explanation.moments]
        assert sum(counters[-1]["args"].values()) == 0
    assert sum(e["args"].get("nbytes", 0) for e in events if e["ph"] == "X") == sum(
        e.nbytes for e in explanation.events
    )


def test_streams_stand_in_one_order_on_both_sides() -> None:
    events = events_of(small(measured=measured()))
    predicted, seen = threads(events, PREDICTED), threads(events, MEASURED)
    assert predicted == seen
    assert [predicted[tid] for tid in sorted(predicted)] == ["compute", "to_device", "to_home"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.partition(":")[0] for name in names] == ["predicted", "measured"]


def test_exchanges_between_ranks_have_streams_of_their_own() -> None:
    predicted = threads(events_of(ranked()), PREDICTED)
    assert [predicted[tid] for tid in sorted(predicted)] == ["compute", "to_device", "to_home", "gather", "scatter"]


def test_measured_bytes_stand_at_the_measured_time_of_their_call() -> None:
    counters = [e for e in events_of(small(measured=measured())) if e["name"] == IN_USE and e["pid"] == MEASURED]
    assert [(e["ts"], e["args"]["bytes"]) for e in counters] == [(2200.0, 110 * MIB), (5500.0, 188 * MIB)]


def test_the_budget_is_a_line_over_both_sides() -> None:
    events = events_of(small(measured=measured()))
    for pid in (PREDICTED, MEASURED):
        budget = [e for e in events if e["name"] == BUDGET and e["pid"] == pid]
        end = max(e["ts"] + e.get("dur", 0) for e in events if e["ph"] != "M" and e["pid"] == pid)
        assert [(e["ts"], e["args"]) for e in budget] == [(0, {"bytes": 200 * MIB}), (end, {"bytes": 200 * MIB})]


def test_tracks_of_counters_stand_in_a_sensible_order() -> None:
    """Perfetto sorts them by name: of the counter and of its series."""
    tracks = sorted({f"{e['name']} {series}" for e in events_of(small()) if e["ph"] == "C" for series in e["args"]})
    assert tracks[:2] == ["device budget bytes", "device in use bytes"]
    assert all(track.startswith("device in use: ") for track in tracks[2:])


def test_a_stall_of_no_time_is_no_slice() -> None:
    """Rounding leaves some; a call of no time is there all the same."""
    stall, call = event(COMPUTE, "stall", "param:1", 1, 1 + 1e-9), event(COMPUTE, "call", "forward.0", 1, 1)
    names = [e["name"] for e in events_of(small(events=(stall, call))) if e["ph"] == "X"]
    assert names == ["forward.0"]


def test_no_stream_is_a_main_thread() -> None:
    """Perfetto says so of a thread that has the number of its process."""
    assert all(e["tid"] not in (PREDICTED, MEASURED) for e in events_of(small(measured=measured())) if e["ph"] == "X")


def test_a_run_that_recorded_no_events_has_no_process() -> None:
    events = events_of(small(measured=measured(events=())))
    assert {e["pid"] for e in events} == {PREDICTED}
    assert sum(e["ph"] == "X" for e in events) == len(EVENTS)
