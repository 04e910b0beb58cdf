"""Render the predicted step, and the measured one, as Chrome trace events, to be opened in Perfetto (ui.perfetto.dev).

Each step is a process, with one thread per stream, and counters: the budget, the bytes in use, and these by kind.
Viewers sort counters by name. Times are in microseconds, with three digits for nanoseconds. Format: "Trace Event
Format", Google, 2016; `X` complete events, `C` counters, `M` metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from chunkc.ir.explanation import KINDS, STREAMS, Explanation, TimedEvent

PREDICTED, MEASURED = 1, 2
"""Process numbers of the two steps."""

_LANES = 100
"""Threads are numbered (stream + 1) * _LANES + lane. A thread with its process's number is shown as the main one."""

BUDGET, IN_USE, BY_KIND = "device budget", "device in use", "device in use:"
"""Counters. Perfetto makes a track of each series of a counter, named after both."""


def render_trace(explanation: Explanation) -> str:
    """Render the trace as JSON: metadata first, then all other events by time."""
    title = f"{explanation.model} on {explanation.hardware}"
    metadata = _process(PREDICTED, f"predicted: {title}")
    timed = [*_counters(explanation)]
    metadata_of, slices = _threads(PREDICTED, explanation.events)
    metadata += metadata_of
    timed += slices
    measured = explanation.measured
    if measured is not None and measured.events:
        metadata += _process(MEASURED, f"measured: {title}")
        metadata_of, slices = _threads(MEASURED, measured.events)
        metadata += metadata_of
        timed += [*slices, *_measured_counters(explanation)]
    timed.sort(key=lambda event: event["ts"])
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {
            "model": explanation.model,
            "hardware": explanation.hardware,
            "memory_budget_nbytes": explanation.memory_budget_nbytes,
            "predicted_peak_nbytes": explanation.predicted_peak_nbytes,
        },
    }
    events = ",\n".join(json.dumps(event, allow_nan=False) for event in [*metadata, *timed])
    return json.dumps(trace)[:-1] + f', "traceEvents": [\n{events}\n]}}\n'


def _process(pid: int, name: str) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}},
    ]


def _threads(pid: int, events: Sequence[TimedEvent]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the threads' metadata, and the slices on them.

    Slices of one thread must nest or lie apart; slices that overlap otherwise get further threads. A stall of less than
    a nanosecond is left out: viewers would draw it as an instant inside a call.
    """
    streams = [*STREAMS, *dict.fromkeys(event.stream for event in events if event.stream not in STREAMS)]
    metadata: list[dict[str, Any]] = []
    slices: list[dict[str, Any]] = []
    for index, stream in enumerate(streams):
        ends_ns: list[int] = []
        for event in sorted((e for e in events if e.stream == stream), key=lambda e: e.start_s):
            start_ns, end_ns = _ns(event.start_s), _ns(event.end_s)
            if event.kind == "stall" and start_ns == end_ns:
                continue
            lane = next((lane for lane, end in enumerate(ends_ns) if end <= start_ns), len(ends_ns))
            ends_ns[lane : lane + 1] = [end_ns]
            slices.append(_slice(pid, (index + 1) * _LANES + lane, event, start_ns, end_ns))
        for lane in range(max(1, len(ends_ns))):
            tid = (index + 1) * _LANES + lane
            name = stream if lane == 0 else f"{stream} ({lane + 1})"
            metadata += [
                {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}},
                {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}},
            ]
    return metadata, slices


def _slice(pid: int, tid: int, event: TimedEvent, start_ns: int, end_ns: int) -> dict[str, Any]:
    args = {"phase": event.phase, "module": event.module, "nbytes": event.nbytes}
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "name": event.name if event.kind == "call" else f"{event.kind} {event.name}",
        "cat": event.kind,
        "args": {key: value for key, value in args.items() if value},
    }


def _counters(explanation: Explanation) -> Iterable[dict[str, Any]]:
    """Yield counters at each moment; at the end nothing is in use."""
    if not explanation.moments:
        return
    kinds = [kind for kind in KINDS if any(moment.contents.get(kind) for moment in explanation.moments)]
    for moment in explanation.moments:
        yield _counter(PREDICTED, IN_USE, moment.start_s, {"bytes": moment.nbytes})
        nbytes = {kind: moment.contents.get(kind, 0) for kind in kinds}
        yield _counter(PREDICTED, BY_KIND, moment.start_s, nbytes)
    end_s = max([explanation.step_time_s.total, *(event.end_s for event in explanation.events)])
    yield _counter(PREDICTED, IN_USE, end_s, {"bytes": 0})
    yield _counter(PREDICTED, BY_KIND, end_s, dict.fromkeys(kinds, 0))
    yield from _budget(PREDICTED, explanation, end_s)


def _measured_counters(explanation: Explanation) -> Iterable[dict[str, Any]]:
    """Yield the measured bytes of each call, at its measured time."""
    assert explanation.measured is not None
    events = explanation.measured.events
    starts_s = {event.name: event.start_s for event in reversed(events) if event.kind != "stall"}
    for call, nbytes in explanation.measured.moments:
        if nbytes is not None and call in starts_s:
            yield _counter(MEASURED, IN_USE, starts_s[call], {"bytes": nbytes})
    yield from _budget(MEASURED, explanation, max(event.end_s for event in events))


def _budget(pid: int, explanation: Explanation, end_s: float) -> Iterable[dict[str, Any]]:
    """Yield the budget at the beginning and at the end: a single value would be a track without length."""
    for time_s in (0.0, end_s):
        yield _counter(pid, BUDGET, time_s, {"bytes": explanation.memory_budget_nbytes})


def _counter(pid: int, name: str, time_s: float, nbytes: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "pid": pid, "tid": 0, "ts": _ns(time_s) / 1e3, "name": name, "args": nbytes}


def _ns(seconds: float) -> int:
    """Round to whole nanoseconds, so that slices that touch in seconds still touch."""
    return round(seconds * 1e9)
