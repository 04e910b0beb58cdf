"""Copies against the clock: both ways of a link are busy at once, and the plan's own clock is the simulator's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkc.ir.hardware import Hardware
from chunkc.ir.items import Copy, Item
from chunkc.ir.layout import GRAD, PARAM, Chunk
from chunkc.ir.links import TO_DEVICE, TO_HOME, host_links
from chunkc.ir.plan import Moment, PhasePlan, Position
from chunkc.ir.program import BACKWARD
from chunkc.ir.simulate import simulate, step_time
from chunkc.passes.planning.copy_scheduling import TooSlow
from chunkc.passes.planning.eviction import Schedule, schedule


def call(name: str, reads: frozenset[Chunk], writes: frozenset[Chunk], cost_s: float) -> Position:
    return Position(name, BACKWARD, 0, "op", "", reads, writes, cost_s)


def simulated_s(found: Schedule, positions: list[Position], hardware: Hardware) -> float:
    moments = tuple(
        Moment(
            name=one.name, phase=BACKWARD, op="", module="", parameter_nbytes=0, gradient_nbytes=0, state_nbytes=0,
            other_nbytes=0, non_model_nbytes=0, slot_nbytes=nbytes,
        )
        for one, nbytes in zip(positions, found.occupancy, strict=True)
    )  # fmt: skip
    phase = PhasePlan(BACKWARD, found.stops(), moments)
    return step_time(simulate([phase], {one.name: one.cost_s for one in positions}, hardware)).total


def test_what_leaves_does_not_hold_up_what_computes() -> None:
    """Each call changes a chunk of its own, whose copies take as long as the call, and there is room for three: one
    that comes, one that is changed, one that leaves. Only the first load and the last write-back are waited for."""
    positions = [call(str(at), frozenset(), frozenset({Chunk(PARAM, at)}), 1.0) for at in range(8)]
    items: dict[Any, Item] = {Chunk(PARAM, at): Item(1, Copy(TO_DEVICE), Copy(TO_HOME)) for at in range(8)}
    found = schedule(positions, items, [3] * 8, Hardware(1.0, 1.0, host_links(1.0, 1.0)))
    assert found.seconds == pytest.approx(1 + 8 + 1)


def test_a_chunk_that_is_needed_soon_does_not_wait_for_write_backs_that_leave_it_room() -> None:
    """Four chunks are changed by quick calls, and a slow link takes them away while a long call computes."""
    changed = [call(str(at), frozenset(), frozenset({Chunk(PARAM, at)}), 0.0) for at in range(4)]
    long = call("long", frozenset(), frozenset(), 9.0)
    last = call("last", frozenset({Chunk(PARAM, 4)}), frozenset(), 1.0)
    positions = [*changed, long, last]
    items: dict[Any, Item] = {Chunk(PARAM, at): Item(1, Copy(TO_DEVICE), Copy(TO_HOME)) for at in range(5)}
    found = schedule(positions, items, [5] * 6, Hardware(1.0, 1.0, host_links(1e9, 1.0)))
    assert found.seconds == pytest.approx(10)


def test_what_only_takes_its_room_takes_it_when_it_is_needed() -> None:
    """As the slot of a gradient that all ranks add up: the parameter behind it in the queue is loaded ahead alone."""
    positions = [
        call("0", frozenset({Chunk(PARAM, 0)}), frozenset(), 1.0),
        call("1", frozenset({Chunk(PARAM, 1)}), frozenset({Chunk(GRAD, 1)}), 1.0),
    ]
    items: dict[Any, Item] = {Chunk(PARAM, at): Item(1, Copy(TO_DEVICE), Copy(TO_HOME)) for at in range(2)}
    items[Chunk(GRAD, 1)] = Item(10, Copy(TO_DEVICE, 0), Copy(TO_HOME))
    found = schedule(positions, items, [100] * 2, Hardware(1.0, 1.0, host_links(1.0, 1e9)))
    assert found.occupancy == (2, 11)
    assert found.seconds == pytest.approx(1 + 2)


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[Position], dict[Any, Item], list[int], Hardware, list[int]]:
    chunks = [Chunk(kind, group) for kind in (PARAM, GRAD) for group in range(4)]
    items: dict[Any, Item] = {c: Item(draw(st.integers(1, 9)), Copy(TO_DEVICE), Copy(TO_HOME)) for c in chunks}
    pick = st.frozensets(st.sampled_from(chunks), max_size=2)
    cost = st.sampled_from([0.0, 0.3, 1.0, 5.0])
    positions = [call(str(at), draw(pick), draw(pick), draw(cost)) for at in range(draw(st.integers(1, 14)))]
    capacity = [sum(items[c].nbytes for c in one.items) + draw(st.integers(0, 25)) for one in positions]
    barriers = sorted({0, *draw(st.sets(st.integers(1, len(positions)), max_size=2))})
    rate = st.sampled_from([0.2, 1.0, 3.0, 1e9])
    return positions, items, capacity, Hardware(1.0, 1.0, host_links(draw(rate), draw(rate))), barriers


@settings(deadline=None, max_examples=300)
@given(instances())
def test_the_clock_is_the_simulators(
    instance: tuple[list[Position], dict[Any, Item], list[int], Hardware, list[int]],
) -> None:
    positions, items, capacity, hardware, barriers = instance
    found = schedule(positions, items, capacity, hardware, barriers)
    assert found.seconds == pytest.approx(simulated_s(found, positions, hardware))


@settings(deadline=None, max_examples=100)
@given(instances(), st.sampled_from([0.5, 0.999, 1.001, 2.0]))
def test_only_calls_that_take_too_long_are_given_up(
    instance: tuple[list[Position], dict[Any, Item], list[int], Hardware, list[int]], part: float
) -> None:
    expected = schedule(*instance)
    try:
        found = schedule(*instance, most_s=expected.seconds * part)
    except TooSlow:
        assert part < 1
    else:
        assert found.seconds == expected.seconds
        assert found.stops() == expected.stops()


def test_arithmetic_that_takes_too_long_is_not_begun() -> None:
    positions = [call("0", frozenset(), frozenset(), 1.0), call("1", frozenset(), frozenset(), 1.0)]
    with pytest.raises(TooSlow):
        schedule(positions, {}, [0, 0], Hardware(1.0, 1.0, host_links(1.0, 1.0)), most_s=1.5)
