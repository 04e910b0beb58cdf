"""The simulated clock on hand-made plans: queues, stalls, overlap, the CPU's updates, where a step's seconds go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from chunk_names import chunk
from hypothesis import given
from hypothesis import strategies as st

from chunkc.ir.explanation import COMPUTE, HOST_UPDATES, STREAMS, StepTime, TimedEvent, Traffic
from chunkc.ir.hardware import Hardware
from chunkc.ir.items import SavedStorage
from chunkc.ir.links import (
    BETWEEN_DEVICES,
    BETWEEN_HOSTS,
    GATHER,
    SCATTER,
    TO_DEVICE,
    TO_HOME,
    LinkSpec,
    host_links,
)
from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK, Event, Moment, PhasePlan
from chunkc.ir.program import BACKWARD, FORWARD, UPDATE
from chunkc.ir.simulate import BY_THE_CPU, RESIDENT_UPDATE, HostUpdateTimes, link_nbytes, simulate, step_time, traffic

MACHINE = Hardware(flops_per_s=1.0, memory_bytes_per_s=280.0, links=host_links(100.0, 50.0))
"""100 bytes a second in, 50 out."""

LINKS = {PREFETCH: TO_DEVICE, WAIT: "", WRITE_BACK: TO_HOME, EVICT: ""}

Stop = Sequence[tuple[str, str, int]]


def events_of(stop: Stop) -> tuple[Event, ...]:
    return tuple(
        Event(kind, chunk(name) if ":" in name else SavedStorage(name), nbytes, LINKS[kind])
        for kind, name, nbytes in stop
    )


def phase(name: str, *stops: Stop) -> PhasePlan:
    """A phase of calls `name.0`, `name.1`, ...: one stop of (kind, chunk, bytes) before each, one after the last."""
    moments = tuple(Moment(f"{name}.{i}", name, "op", f"layer.{i}", 0, 0, 0, 0, 0, 0) for i in range(len(stops) - 1))
    return PhasePlan(name, tuple(map(events_of, stops)), moments)


def test_saved_storages_share_the_links_with_chunks_and_are_waited_for() -> None:
    forward = phase(FORWARD, [], [(WRITE_BACK, "a", 100)], [(WAIT, "a", 100), (EVICT, "a", 100)])
    backward = phase(BACKWARD, [(PREFETCH, "a", 100), (PREFETCH, "param:0", 100), (WAIT, "a", 100)], [])
    events = simulate([forward, backward], dict.fromkeys(("forward.0", "forward.1", "backward.0"), 1.0), MACHINE)
    assert spans(events, TO_HOME) == [(WRITE_BACK, "a", 1, 3)]
    assert spans(events, TO_DEVICE) == [(PREFETCH, "a", 3, 4), (PREFETCH, "param:0", 4, 5)]
    assert [span for span in spans(events, COMPUTE) if span[0] == "stall"] == [
        ("stall", "a", 2, 3),
        ("stall", "a", 3, 4),
    ]
    assert step_time(events) == StepTime(total=5, compute=3, to_device=2, to_home=2, optimizer=0, stall=2)
    assert traffic(events) == Traffic(to_device=200, to_home=100)


def test_links_carry_a_rank_s_part_and_what_its_neighbours_lack() -> None:
    between = (LinkSpec(BETWEEN_DEVICES, 10.0), LinkSpec(BETWEEN_HOSTS, 5.0))
    four = replace(MACHINE, links=(*MACHINE.links, *between)).used_by(4)
    events = [
        TimedEvent(stream, "copy", "", 0, 1, nbytes, FORWARD, "")
        for stream, nbytes in ((GATHER, 400), (GATHER, 80), (SCATTER, 400), (TO_HOME, 7), (COMPUTE, 99))
    ]
    carried = {TO_DEVICE: 120, TO_HOME: 107, BETWEEN_DEVICES: 660}
    assert link_nbytes(events, four) == carried
    assert link_nbytes(events, four.used_by(4, 2)) == carried | {BETWEEN_HOSTS: 660}
    alone_on_each = {name: n for name, n in carried.items() if name != BETWEEN_DEVICES}
    assert link_nbytes(events, four.used_by(4, 4)) == alone_on_each | {BETWEEN_HOSTS: 660}
    through_ram = {TO_DEVICE: 120 + 660, TO_HOME: 107 + 660}
    assert link_nbytes(events, MACHINE.used_by(4)) == through_ram


@pytest.mark.parametrize("queue", [GATHER, SCATTER])
def test_an_exchange_takes_its_queue_for_a_part_s_copy_and_a_ring(queue: str) -> None:
    between = (LinkSpec(BETWEEN_DEVICES, 10.0, 0.5),)
    four = replace(MACHINE, links=(*MACHINE.links, *between)).used_by(4)
    kind, rate = (PREFETCH, 100.0) if queue == GATHER else (WRITE_BACK, 50.0)
    stops = ((Event(kind, chunk("param:0"), 400, queue), Event(WAIT, chunk("param:0"), 400, queue)), ())
    moment = Moment("forward.0", FORWARD, "op", "h", 0, 0, 0, 0, 0, 0)
    events = simulate([PhasePlan(FORWARD, stops, (moment,))], {"forward.0": 1.0}, four)
    (exchange,) = (event for event in events if event.stream == queue)
    assert exchange.end_s - exchange.start_s == pytest.approx(100 / rate + 300 / 10 + 3 * 0.5)
    assert step_time(events).stall == pytest.approx(exchange.end_s)


NO_TIME = defaultdict[str, float](float)
"""Calls that take none."""


def spans(events: Sequence[TimedEvent], stream: str) -> list[tuple[str, str, float, float]]:
    return [(e.kind, e.name, e.start_s, e.end_s) for e in events if e.stream == stream]


def test_copies_queue_on_their_link_and_a_wait_stalls() -> None:
    stops = ([(PREFETCH, "param:0", 100), (PREFETCH, "param:1", 200), (WAIT, "param:0", 0)], [(WAIT, "param:1", 0)], [])
    events = simulate([phase(FORWARD, *stops)], {"forward.0": 0.5, "forward.1": 1.0}, MACHINE)
    assert spans(events, TO_DEVICE) == [(PREFETCH, "param:0", 0, 1), (PREFETCH, "param:1", 1, 3)]
    assert spans(events, COMPUTE) == [
        ("stall", "param:0", 0, 1),
        ("call", "forward.0", 1, 1.5),
        ("stall", "param:1", 1.5, 3),
        ("call", "forward.1", 3, 4),
    ]
    assert step_time(events) == StepTime(total=4, compute=1.5, to_device=3, to_home=0, optimizer=0, stall=2.5)
    assert traffic(events) == Traffic(to_device=300, to_home=0)


def test_the_links_run_beside_each_other() -> None:
    stops = ([(WRITE_BACK, "param:0", 100), (PREFETCH, "param:1", 100), (WAIT, "param:1", 0)], [])
    events = simulate([phase(UPDATE, *stops)], {"update.0": 5.0}, MACHINE)
    assert spans(events, TO_DEVICE) == [(PREFETCH, "param:1", 0, 1)]
    assert spans(events, TO_HOME) == [(WRITE_BACK, "param:0", 0, 2)]
    assert step_time(events).total == 6


def test_a_wait_is_for_the_latest_copy_either_way() -> None:
    """A chunk on its way home must be there before its slot goes to another; without a copy a wait is free."""
    stops = ([(WRITE_BACK, "param:0", 100), (WAIT, "param:0", 0), (EVICT, "param:0", 100), (WAIT, "param:9", 0)], [])
    events = simulate([phase(FORWARD, *stops)], {"forward.0": 1.0}, MACHINE)
    assert spans(events, COMPUTE) == [("stall", "param:0", 0, 2), ("call", "forward.0", 2, 3)]


def test_gradients_are_read_from_home_once_the_step_has_written_them() -> None:
    gone = [(WRITE_BACK, "grad:0", 100), (WAIT, "grad:0", 0), (EVICT, "grad:0", 100)]
    first = [(PREFETCH, "grad:0", 100), (WAIT, "grad:0", 0)]
    backward = phase(BACKWARD, first, [*gone, *first], [*gone, (PREFETCH, "grad:1", 100)])
    update = phase(UPDATE, [(PREFETCH, "grad:0[0:10]", 40)], [])
    events = simulate([backward, update], NO_TIME, MACHINE)
    assert [e.name for e in events if e.stream == TO_DEVICE] == ["grad:0", "grad:0[0:10]"]
    assert traffic(events) == Traffic(to_device=140, to_home=200)


def test_what_stays_is_updated_first() -> None:
    update = phase(UPDATE, [(PREFETCH, "param:0", 100), (WAIT, "param:0", 0)], [])
    events = simulate([phase(FORWARD, [], []), update], {"forward.0": 1, "update.0": 2}, MACHINE, resident_update_s=4)
    assert spans(events, COMPUTE) == [
        ("call", "forward.0", 0, 1),
        ("update", RESIDENT_UPDATE, 1, 5),
        ("stall", "param:0", 5, 6),
        ("update", "update.0", 6, 8),
    ]
    assert step_time(events).optimizer == 6


def test_nothing_at_all() -> None:
    assert simulate([], {}, MACHINE) == ()
    assert step_time(()) == StepTime(0, 0, 0, 0, 0, 0)


def test_updates_say_their_bytes_and_nothing_else_does() -> None:
    update = phase(UPDATE, [(PREFETCH, "param:0", 100), (WAIT, "param:0", 0)], [])
    events = simulate(
        [phase(FORWARD, [], []), update], {"forward.0": 1, "update.0": 2}, MACHINE, resident_update_s=4,
        update_nbytes={"update.0": 56, RESIDENT_UPDATE: 112, "param:0": 7, "forward.0": 9},
    )  # fmt: skip
    assert [(e.kind, e.name, e.nbytes) for e in events] == [
        ("call", "forward.0", 0),
        ("update", RESIDENT_UPDATE, 112),
        (PREFETCH, "param:0", 100),
        ("stall", "param:0", 0),
        ("update", "update.0", 56),
    ]
    assert traffic(events) == Traffic(to_device=100, to_home=0)


CHUNKS = [f"{kind}:{i}" for kind in ("param", "grad", "exp_avg") for i in range(3)]
events_ = st.tuples(st.sampled_from([PREFETCH, WAIT, EVICT, WRITE_BACK]), st.sampled_from(CHUNKS), st.integers(0, 500))
stops_ = st.lists(st.lists(events_, max_size=4), min_size=1, max_size=6)


@given(st.lists(stops_, min_size=3, max_size=3), st.lists(st.floats(0, 10), min_size=20, max_size=20), st.floats(0, 5))
def test_time_is_conserved(stops: list[list[Stop]], costs: list[float], resident_s: float) -> None:
    phases = [phase(name, *s) for name, s in zip((FORWARD, BACKWARD, UPDATE), stops)]
    names = [moment.name for p in phases for moment in p.moments]
    costs_s: Mapping[str, float] = dict(zip(names, costs))
    events = simulate(phases, costs_s, MACHINE, resident_update_s=resident_s)
    time = step_time(events)
    assert time.total == pytest.approx(time.compute + time.optimizer + time.stall)
    assert time.compute + time.optimizer == pytest.approx(sum(costs_s.values()) + resident_s)
    assert [e.start_s for e in events] == sorted(e.start_s for e in events)
    for stream in STREAMS:  # one thing after another, and nothing backwards
        on_stream = sorted((e for e in events if e.stream == stream), key=lambda e: (e.start_s, e.end_s))
        assert all(e.end_s >= e.start_s for e in on_stream)
        assert all(after.start_s >= before.end_s for before, after in pairwise(on_stream))
    copied = traffic(events)

    def nbytes_of(kind: str) -> int:
        return sum(event.nbytes for p in phases for stop in p.stops for event in stop if event.kind == kind)

    assert time.to_device == pytest.approx(copied.to_device / 100)
    assert time.to_home == pytest.approx(copied.to_home / 50)
    assert copied.to_home == nbytes_of(WRITE_BACK)
    assert copied.to_device <= nbytes_of(PREFETCH)


@given(stops_, st.floats(0.01, 10))
def test_faster_links_never_make_a_step_longer(stops: list[Stop], cost_s: float) -> None:
    phases = [phase(FORWARD, *stops)]
    costs = {moment.name: cost_s for moment in phases[0].moments}
    fast = Hardware(1, 280, links=host_links(200, 100))
    slow_s, fast_s = (step_time(simulate(phases, costs, machine)).total for machine in (MACHINE, fast))
    assert fast_s <= slow_s + 1e-9


# --- updates by the CPU ---

EVEN = replace(MACHINE, links=host_links(100.0, 100.0))


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
    events = simulate(STEP, COSTS, EVEN, host_updates=HostUpdateTimes({0: 3.0, 1: 4.0}))
    assert at_home(events) == [
        ("param:0", END_OF_BACKWARD, END_OF_BACKWARD + 3),
        ("param:1", END_OF_BACKWARD + 3, END_OF_BACKWARD + 7),
    ]
    assert [e.name for e in events if e.stream == COMPUTE][-1] == BY_THE_CPU
    time = step_time(events)
    assert (time.total, time.optimizer) == (END_OF_BACKWARD + 7, 7)
    assert time.total == time.compute + time.optimizer + time.stall


def test_in_the_backward_they_begin_when_a_group_is_settled() -> None:
    events = simulate(STEP, COSTS, EVEN, host_updates=HostUpdateTimes({0: 3.0, 1: 4.0}, overlaps_backward=True))
    arrived = 6 + 1  # after backward.0, group 1's gradient goes home
    assert at_home(events) == [("param:1", arrived, arrived + 4), ("param:0", 11, 14)]
    assert step_time(events).optimizer == 14 - END_OF_BACKWARD


def test_a_group_that_is_fetched_again_is_not_updated_before() -> None:
    again = phase(BACKWARD, [], written(0), fetched(0), [(WAIT, "grad:0", 0)])
    costs_s = {"backward.0": 2.0, "backward.1": 0.0, "backward.2": 0.0}
    events = simulate([again], costs_s, EVEN, host_updates=HostUpdateTimes({0: 1.0}, overlaps_backward=True))
    (fetch,) = [e for e in events if e.stream == TO_DEVICE]
    assert at_home(events) == [("param:0", fetch.end_s, fetch.end_s + 1)]


def test_in_the_next_forward_each_fetch_waits_for_its_group() -> None:
    events = simulate(STEP, COSTS, EVEN, host_updates=HostUpdateTimes({0: 3.0, 1: 4.0}, overlaps_forward=True))
    fetches = {e.name: e.start_s for e in events if e.stream == TO_DEVICE and e.phase == FORWARD}
    assert fetches == {"param:0": 3, "param:1": 7}
    assert step_time(events).optimizer == 0
    assert step_time(events).stall == (3 + 1) + (7 + 1 - 5) + 1 + 1


def test_the_first_groups_needed_come_first() -> None:
    order = phase(FORWARD, fetched(1), fetched(0), [])
    for overlaps_forward in (False, True):
        updates = HostUpdateTimes({0: 1.0, 1: 1.0}, overlaps_forward=overlaps_forward)
        events = simulate([order, phase(UPDATE, [])], defaultdict[str, float](float), EVEN, host_updates=updates)
        assert [name for name, _, _ in at_home(events)] == ["param:1", "param:0"]


@pytest.mark.parametrize("overlaps_backward", [False, True])
def test_overlap_never_costs_time(overlaps_backward: bool) -> None:
    seconds = {0: 3.0, 1: 4.0}
    plain = step_time(simulate(STEP, COSTS, EVEN, host_updates=HostUpdateTimes(seconds)))
    for overlaps_forward in (False, True):
        updates = HostUpdateTimes(seconds, overlaps_forward=overlaps_forward, overlaps_backward=overlaps_backward)
        assert step_time(simulate(STEP, COSTS, EVEN, host_updates=updates)).total <= plain.total
