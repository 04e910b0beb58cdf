"""Replay a plan against the clock: when each call runs, when each copy is on its link, and where computation waits.

The computation goes through the plan in order, by the clock's rules (`chunkc.ir.clock`). Updates by the CPU have a
stream of their own; copies of a group that the CPU updates come after that update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from chunkc.ir.clock import Clock
from chunkc.ir.explanation import COMPUTE, HOST_UPDATES, StepTime, TimedEvent, Traffic
from chunkc.ir.hardware import Hardware
from chunkc.ir.items import MovedId
from chunkc.ir.layout import CASTS, GRAD, PARAM, Chunk
from chunkc.ir.links import GATHER, INWARD, LINKS, QUEUES
from chunkc.ir.plan import PREFETCH, WAIT, WRITE_BACK, Event, PhasePlan
from chunkc.ir.program import BACKWARD, UPDATE

RESIDENT_UPDATE = "update of what stays"
"""Name of the event for the update of residents."""

CHECKSUMS = "checksums of home"
"""Name of the event for the checksums, in the optimizer's step, of what the backward's undoable updates have read."""

BY_THE_CPU = "updates by the CPU"
"""Name of the event for the wait, at a step's end, for updates by the CPU."""


@dataclass(frozen=True)
class HostUpdateTimes:
    """Durations of the CPU's updates, one after the other on a stream of their own, and what they overlap.

    Attributes:
        seconds: of each group's, by its index.
        overlaps_forward: the next forward goes on meanwhile, and waits for a group where it fetches it.
        overlaps_backward: a group's update begins when its gradients have arrived and nothing of it is fetched again.
    """

    seconds: Mapping[int, float] = field(default_factory=dict)
    overlaps_forward: bool = False
    overlaps_backward: bool = False


NO_HOST_UPDATES = HostUpdateTimes()


def simulate(
    phases: Sequence[PhasePlan],
    costs_s: Mapping[str, float],
    hardware: Hardware,
    *,
    resident_update_s: float = 0.0,
    checksums_s: float = 0.0,
    host_updates: HostUpdateTimes = NO_HOST_UPDATES,
    update_nbytes: Mapping[str, int] = MappingProxyType({}),
    replicated: Mapping[int, bool] = MappingProxyType({}),
) -> tuple[TimedEvent, ...]:
    """Simulate one step that begins without gradients; return the events of each stream, in order of time.

    Args:
        phases: in the order in which they run: forward, backward, the optimizer's update.
        costs_s: seconds of arithmetic of each call, by the moment's name.
        resident_update_s: the update of residents; it comes first in the optimizer's step, behind the checksums.
        checksums_s: the checksums of what was updated in the backward and can be undone.
        host_updates: updates by the CPU. If they overlap the next forward, the simulated step follows another, and
            begins with the updates that that one left.
        update_nbytes: bytes that each update reads and writes, by its event's name.
        replicated: groups of replicated parameters, kept from one step to the next, and whether updates change
            them: then they are gathered once in a step, else never.
    """
    first_s = {name: s for name, s in ((CHECKSUMS, checksums_s), (RESIDENT_UPDATE, resident_update_s)) if s > 0}
    replay = partial(_replay, phases, costs_s, hardware, first_s, host_updates, replicated)
    events, left_s = replay({})
    if left_s:
        events, _ = replay(left_s)
    return tuple(
        replace(event, nbytes=update_nbytes.get(event.name, 0)) if event.kind == "update" else event for event in events
    )


def _replay(
    phases: Sequence[PhasePlan],
    costs_s: Mapping[str, float],
    hardware: Hardware,
    first_s: Mapping[str, float],
    host_updates: HostUpdateTimes,
    replicated: Mapping[int, bool],
    left_s: Mapping[int, float],
) -> tuple[tuple[TimedEvent, ...], dict[int, float]]:
    """Replay one step, and return its events and the updates that it leaves to the next one.

    Args:
        first_s: what comes first in the optimizer's step: seconds by name.
        left_s: updates that the step before has left to this one.

    Returns:
        The events, and of each group that is not updated yet the seconds until the end of its update.
    """
    events: list[TimedEvent] = []
    clock = Clock({HOST_UPDATES: max(left_s.values(), default=0.0)})
    done: dict[MovedId, float] = {}  # item -> when its latest copy is done
    updated = dict(left_s)  # group -> when the latest update at home ends
    needed: dict[int, None] = {}  # groups in the order of their first fetch
    to_do = dict(host_updates.seconds)
    current = {group for group, changes in replicated.items() if not changes}  # whole here, as all ranks have them

    def copy(event: Event, phase: str) -> None:
        at_rest = updated.get(event.item.group, 0.0) if isinstance(event.item, Chunk) else 0.0
        begin, end = clock.copy(event.link, hardware.copy_s(event.link, event.nbytes), at_rest)
        done[event.item] = end
        events.append(TimedEvent(event.link, event.kind, str(event.item), begin, end, event.nbytes, phase, ""))

    def update_on_host(group: int, ready: float, phase: str) -> None:
        begin, updated[group] = clock.copy(HOST_UPDATES, to_do.pop(group), ready)
        events.append(TimedEvent(HOST_UPDATES, "update", str(Chunk(PARAM, group)), begin, updated[group], 0, phase, ""))

    def compute(kind: str, name: str, seconds: float, phase: str, module: str = "") -> None:
        begin = clock.now
        clock.run(seconds)
        events.append(TimedEvent(COMPUTE, kind, name, begin, clock.now, 0, phase, module))

    def wait(kind: str, name: str, until: float, phase: str) -> None:
        if until > clock.now:
            events.append(TimedEvent(COMPUTE, kind, name, clock.now, until, 0, phase, ""))
            clock.wait(until)

    for phase in phases:
        last = {where: group for group, where in phase.last_copies().items()}
        for name, seconds in first_s.items() if phase.phase == UPDATE else ():
            compute("update", name, seconds, UPDATE)
        if phase.phase == UPDATE:
            home_free = max(clock.free_s(link) for link in QUEUES if link not in INWARD)
            order = {group: at for at, group in enumerate(needed)}
            for group in sorted(to_do, key=lambda group: (order.get(group, len(order)), group)):
                update_on_host(group, home_free, UPDATE)
        for index, stop in enumerate(phase.stops):
            for place, event in enumerate(stop):
                if event.kind == WAIT:
                    wait("stall", str(event.item), done.get(event.item, 0.0), phase.phase)
                if not isinstance(event.item, Chunk):
                    if event.kind in (PREFETCH, WRITE_BACK):
                        copy(event, phase.phase)
                    continue
                kind, group = event.item.kind, event.item.group
                if event.kind == PREFETCH and (kind != GRAD or group in clock.written):
                    if not (event.link == GATHER and group in current):
                        copy(event, phase.phase)
                    current |= {group} & replicated.keys()
                    needed.setdefault(group)
                elif event.kind == WRITE_BACK:
                    copy(event, phase.phase)
                    if kind == GRAD:
                        clock.written.add(group)
                if (
                    host_updates.overlaps_backward
                    and phase.phase == BACKWARD
                    and (index, place) in last
                    and group in to_do
                ):
                    ready = max(done.get(Chunk(kind, group), 0.0) for kind in (PARAM, GRAD, *CASTS))
                    update_on_host(group, ready, phase.phase)
            if index < len(phase.moments):
                moment = phase.moments[index]
                kind = "update" if phase.phase == UPDATE or index in phase.tiles else "call"
                compute(kind, moment.name, costs_s[moment.name], phase.phase, moment.module)
    if not host_updates.overlaps_forward:
        wait("update", BY_THE_CPU, clock.free_s(HOST_UPDATES), UPDATE)
    left = {group: end - clock.now for group, end in updated.items() if end > clock.now}
    return tuple(sorted(events, key=lambda event: (event.start_s, event.end_s))), left


def step_time(events: Sequence[TimedEvent]) -> StepTime:
    """Sum up the seconds of a simulated step by cause."""

    def busy(*kinds: str, streams: Collection[str] = (COMPUTE,)) -> float:
        return sum(e.end_s - e.start_s for e in events if e.stream in streams and e.kind in kinds)

    return StepTime(
        total=max((event.end_s for event in events if event.stream == COMPUTE), default=0.0),
        compute=busy("call"),
        to_device=busy(PREFETCH, streams=QUEUES),
        to_home=busy(WRITE_BACK, streams=QUEUES),
        optimizer=busy("update"),
        stall=busy("stall"),
    )


def link_nbytes(events: Sequence[TimedEvent], hardware: Hardware) -> dict[str, int]:
    """Return the bytes that each link of one device carries in a simulated step, by the link's name.

    Those between ranks are of one direction.
    """
    carried: Counter[str] = Counter()
    for event in events:
        if event.stream in QUEUES:
            carried.update(hardware.carried_nbytes(event.stream, event.nbytes))
    return {name: carried[name] for name in LINKS if carried[name]}


def traffic(events: Sequence[TimedEvent]) -> Traffic:
    """Return the bytes that a simulated step copies, each way."""
    copies = [event for event in events if event.stream in QUEUES]
    inwards = sum(event.nbytes for event in copies if event.stream in INWARD)
    return Traffic(inwards, sum(event.nbytes for event in copies) - inwards)
