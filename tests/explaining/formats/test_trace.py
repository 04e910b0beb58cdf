"""A strict reader of the trace event format, and real traces held against it.

Rules from "Trace Event Format" (Google, 2016) and what Perfetto makes of it: a JSON object with `traceEvents`; every
event has `ph`, `pid`, `tid` and `name`; `X` has `ts` and `dur` in microseconds, `C` has `ts` and numbers in `args`,
`M` names a process or thread that is used. On one thread, slices lie apart or nest; here all lie apart.
"""

from __future__ import annotations

import json
from itertools import pairwise
from numbers import Real
from typing import Any

import pytest
import torch
from harness import segmented, take_step
from plain_modules import Stack
from synthetic import EVENTS, event, large, measured, small

import chunkc
from chunkc.explaining.formats import render_trace
from chunkc.explaining.formats.trace import BY_KIND, IN_USE, MEASURED, PREDICTED
from chunkc.ir.explanation import COMPUTE, Explanation
from chunkc.ir.links import TO_DEVICE
from chunkc.ir.simulate import RESIDENT_UPDATE
from chunkc.runtime.device import cpu_allocator

ALLOWED = {
    "M": {"ph", "pid", "tid", "name", "args"},
    "X": {"ph", "pid", "tid", "name", "ts", "dur", "cat", "args"},
    "C": {"ph", "pid", "tid", "name", "ts", "args"},
}
METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def faults(text: str) -> list[str]:
    """What is wrong with a trace; empty where nothing is."""
    found: list[str] = []
    trace = json.loads(text, parse_constant=lambda word: found.append(f"{word} is no JSON"))
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return [*found, "no object with a list `traceEvents`"]
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        found.append("displayTimeUnit is neither ms nor ns")
    events = trace["traceEvents"]
    found += [fault for number, e in enumerate(events) for fault in _faults_of(f"event {number}", e)]
    if found:
        return found
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    slices: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    counters: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for e in events:
        if e["pid"] not in processes:
            found.append(f"process {e['pid']} has no name")
        if e["ph"] == "X":
            if (e["pid"], e["tid"]) not in threads:
                found.append(f"thread {e['tid']} of process {e['pid']} has no name")
            begin, length = _ns(e["ts"]), _ns(e["dur"])
            slices.setdefault((e["pid"], e["tid"]), []).append((begin, begin + length, e["name"]))
        elif e["ph"] == "C":
            counters.setdefault((e["pid"], e["name"]), []).append(e)
    for spans in slices.values():
        for (_, end, first), (begin, _, second) in pairwise(sorted(spans)):
            if begin < end:
                found.append(f"{first} and {second} overlap on one thread")
    for (_, name), readings in counters.items():
        if len({tuple(e["args"]) for e in readings}) > 1:
            found.append(f"counter {name} changes its series")
        if any(a["ts"] > b["ts"] for a, b in pairwise(readings)):
            found.append(f"counter {name} goes back in time")
    return found


def _faults_of(where: str, e: object) -> list[str]:
    if not isinstance(e, dict) or e.get("ph") not in ALLOWED:
        return [f"{where} has no known phase"]
    found = []
    ph, args = e["ph"], e.get("args", {})
    missing = ALLOWED[ph] - {"cat", "args"} - e.keys() if ph == "X" else ALLOWED[ph] - e.keys()
    found += [f"{where} has no {key}" for key in sorted(missing)]
    found += [f"{where} has an unknown {key}" for key in sorted(e.keys() - ALLOWED[ph])]
    found += [f"{where}: {key} is no whole number" for key in ("pid", "tid") if type(e.get(key)) is not int]
    if not isinstance(e.get("name"), str) or not e["name"]:
        found.append(f"{where} has no name")
    for key in ("ts", "dur"):
        value = e.get(key, 0)
        if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= value < 2**53 / 1000:
            found.append(f"{where}: {key} is no time in microseconds")
        elif abs(value * 1000 - round(value * 1000)) > 1e-3:
            found.append(f"{where}: {key} is finer than a nanosecond")
    if not isinstance(args, dict):
        return [*found, f"{where}: args is no object"]
    if ph == "M" and METADATA.get(e.get("name", "")) not in args:
        found.append(f"{where} is no metadata that viewers know")
    if ph == "C" and (not args or any(type(value) not in (int, float) or value < 0 for value in args.values())):
        found.append(f"{where} counts what is no number")
    return found


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


# --- traces ---

CROSSING = (event(TO_DEVICE, "prefetch", "param:1", 0, 3, 1), event(TO_DEVICE, "prefetch", "param:2", 2, 5, 1))
MADE = {
    "small": small(),
    "run": small(measured=measured()),
    "run without times": small(measured=measured(events=())),
    "large": large(40),
    "crossing": small(events=(*EVENTS, *CROSSING)),
    "thirds": small(events=tuple(event(TO_DEVICE, "prefetch", f"param:{i}", i / 3, (i + 1) / 3, 1) for i in range(99))),
    "no time at all": small(events=(event(TO_DEVICE, "prefetch", "param:1", 1, 1, 1),)),
    "bare": small(events=(), moments=()),
}


@pytest.mark.parametrize("name", MADE)
def test_made_explanations_give_valid_traces(name: str) -> None:
    assert faults(render_trace(MADE[name])) == []
    events = events_of(MADE[name])
    timed = [e for e in events if e["ph"] != "M"]
    assert events[: len(events) - len(timed)] == [e for e in events if e["ph"] == "M"], "metadata first"
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    assert all(isinstance(n, int) for e in timed if e["ph"] == "C" for n in e["args"].values())
    assert ("to_device (2)" in threads(events, PREDICTED).values()) == (name == "crossing")


def trained(budget: int) -> Explanation:
    """An explanation, and what two steps measured."""
    model = Stack(6, width=256)
    compiled = segmented(model, budget)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.ones(8, 256)
    for _ in range(2):
        take_step(compiled(x), optimizer)
    return chunkc.explain(compiled, x)


def test_a_trace_shows_a_run_and_its_prediction() -> None:
    cpu_allocator.install()
    explanation = trained(3 * 2**20)
    text = render_trace(explanation)
    assert faults(text) == []
    events = json.loads(text)["traceEvents"]
    calls = {
        pid: [e["name"] for e in events if e["pid"] == pid and e["ph"] == "X" and e.get("cat") in ("call", "update")]
        for pid in (PREDICTED, MEASURED)
    }
    assert len(calls[MEASURED]) > 6
    moving = [name for name in calls[PREDICTED] if name != f"update {RESIDENT_UPDATE}"]
    assert moving == calls[MEASURED], "the same calls, in the same order"
    assert any(e["ph"] == "C" and e["pid"] == MEASURED for e in events)


# --- what they say ---


def events_of(explanation: Explanation) -> list[dict[str, Any]]:
    return json.loads(render_trace(explanation))["traceEvents"]


def threads(events: list[dict[str, Any]], pid: int) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}


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
