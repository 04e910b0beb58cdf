"""Updates by the CPU on the simulated clock: when they begin, what waits for them, and what of them is hidden."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest
from chunk_names import chunk

from chunkc.ir.explanation import COMPUTE, HOST_UPDATES, TimedEvent
from chunkc.ir.hardware import Hardware
from chunkc.ir.links import TO_DEVICE, TO_HOME, host_links
from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK, Event, Moment, PhasePlan
from chunkc.ir.program import BACKWARD, FORWARD, UPDATE
from chunkc.ir.simulate import BY_THE_CPU, HostUpdateTimes, simulate, step_time

MACHINE = Hardware(flops_per_s=1.0, memory_bytes_per_s=280.0, links=host_links(100.0, 100.0))

LINKS = {PREFETCH: TO_DEVICE, WAIT: "", WRITE_BACK: TO_HOME, EVICT: ""}

Stop = Sequence[tuple[str, str, int]]


def events_of(stop: Stop) -> tuple[Event, ...]:
    return tuple(Event(kind, chunk(name), nbytes, LINKS[kind]) for kind, name, nbytes in stop)


def phase(name: str, *stops: Stop) -> PhasePlan:
    moments = tuple(Moment(f"{name}.{i}", name, "op", "", 0, 0, 0, 0, 0, 0) for i in range(len(stops) - 1))
    return PhasePlan(name, tuple(map(events_of, stops)), moments)


def fetched(group: int, seconds: float = 1) -> Stop:
    return [(PREFETCH, f"param:{group}", int(100 * seconds)), (WAIT, f"param:{group}", 0)]


def written(group: int) -> Stop:
    return [(WRITE_BACK, f"grad:{group}", 100)]


FORWARD_OF_TWO = phase(FORWARD, fetched(0), fetched(1), [(EVICT, "param:0", 0)])
BACKWARD_OF_TWO = phase(
    BACKWARD, [], [*written(1), *fetched(0)], [*written(0), (WAIT, "grad:1", 0), (WAIT, "grad:0", 0)]
)  # fmt: skip
STEP = (FORWARD_OF_TWO, BACKWARD_OF_TWO, phase(UPDATE, []))
COSTS = {"forward.0": 1.0, "forward.1": 1.0, "backward.0": 2.0, "backward.1": 2.0}
END_OF_BACKWARD = 1 + 1 + 1 + 1 + 2 + 1 + 2 + 1
"""Two fetches and calls; a call; a fetch and a call; a gradient on its way home."""


def at_home(events: Sequence[TimedEvent]) -> list[tuple[str, float, float]]:
    return [(e.name, e.start_s, e.end_s) for e in events if e.stream == HOST_UPDATES]


def test_without_overlap_they_follow_the_backward_and_are_waited_for() -> None:
    events = simulate(STEP, COSTS, MACHINE, host_updates=HostUpdateTimes({0: 3.0, 1: 4.0}))
    assert at_home(events) == [
        ("param:0", END_OF_BACKWARD, END_OF_BACKWARD + 3),
        ("param:1", END_OF_BACKWARD + 3, END_OF_BACKWARD + 7),
    ]
    assert [e.name for e in events if e.stream == COMPUTE][-1] == BY_THE_CPU
    time = step_time(events)
    assert (time.total, time.optimizer) == (END_OF_BACKWARD + 7, 7)
    assert time.total == time.compute + time.optimizer + time.stall


def test_in_the_backward_they_begin_when_a_group_is_settled() -> None:
    events = simulate(STEP, COSTS, MACHINE, host_updates=HostUpdateTimes({0: 3.0, 1: 4.0}, overlaps_backward=True))
    arrived = 6 + 1  # after backward.0, group 1's gradient goes home
    assert at_home(events) == [("param:1", arrived, arrived + 4), ("param:0", 11, 14)]
    assert step_time(events).optimizer == 14 - END_OF_BACKWARD


def test_a_group_that_is_fetched_again_is_not_updated_before() -> None:
    again = phase(BACKWARD, [], written(0), fetched(0), [(WAIT, "grad:0", 0)])
    costs_s = {"backward.0": 2.0, "backward.1": 0.0, "backward.2": 0.0}
    events = simulate([again], costs_s, MACHINE, host_updates=HostUpdateTimes({0: 1.0}, overlaps_backward=True))
    (fetch,) = [e for e in events if e.stream == TO_DEVICE]
    assert at_home(events) == [("param:0", fetch.end_s, fetch.end_s + 1)]


def test_in_the_next_forward_each_fetch_waits_for_its_group() -> None:
    events = simulate(STEP, COSTS, MACHINE, host_updates=HostUpdateTimes({0: 3.0, 1: 4.0}, overlaps_forward=True))
    fetches = {e.name: e.start_s for e in events if e.stream == TO_DEVICE and e.phase == FORWARD}
    assert fetches == {"param:0": 3, "param:1": 7}
    assert step_time(events).optimizer == 0
    assert step_time(events).stall == (3 + 1) + (7 + 1 - 5) + 1 + 1


def test_the_first_groups_needed_come_first() -> None:
    order = phase(FORWARD, fetched(1), fetched(0), [])
    for overlaps_forward in (False, True):
        updates = HostUpdateTimes({0: 1.0, 1: 1.0}, overlaps_forward=overlaps_forward)
        events = simulate([order, phase(UPDATE, [])], defaultdict[str, float](float), MACHINE, host_updates=updates)
        assert [name for name, _, _ in at_home(events)] == ["param:1", "param:0"]


@pytest.mark.parametrize("overlaps_backward", [False, True])
def test_overlap_never_costs_time(overlaps_backward: bool) -> None:
    seconds = {0: 3.0, 1: 4.0}
    plain = step_time(simulate(STEP, COSTS, MACHINE, host_updates=HostUpdateTimes(seconds)))
    for overlaps_forward in (False, True):
        updates = HostUpdateTimes(seconds, overlaps_forward=overlaps_forward, overlaps_backward=overlaps_backward)
        assert step_time(simulate(STEP, COSTS, MACHINE, host_updates=updates)).total <= plain.total
