"""Each wait for an update at home left out once: what is read or kept then is wrong; with the wait it is right.

An update stands still until a gate opens. With the wait in place the gate opens while somebody waits; without it, when
everybody else is through.
"""

from __future__ import annotations

import dis
import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from store_cases import NUMEL, Gate, Subject, ctrl_c_in_a_wait, opened_soon, raiser

from chunkc.ir.errors import HomeError, StreamError
from chunkc.ir.layout import GRAD, PARAM, Chunk
from chunkc.runtime.device import streams as streams_module
from chunkc.runtime.device import updates as updates_module
from chunkc.runtime.device.streams import WorkerStream
from chunkc.runtime.device.updates import HomeUpdate, HomeUpdates

pytestmark = pytest.mark.timeout(60)

Leave = Callable[[pytest.MonkeyPatch, Subject], None]


@dataclass(frozen=True)
class Wait:
    """A wait of the host.

    Attributes:
        act: begins an update, does what must wait for it, and returns how to see what came of it.
        leave_out: makes the one method that waits a no-op.
        right, wrong: what is seen with and without it.
    """

    name: str
    act: Callable[[Subject], Callable[[], float]]
    leave_out: Leave
    right: float
    wrong: float

    def __str__(self) -> str:
        return self.name


def ignoring(method: str) -> Leave:
    """Leaves out a method of the store, or of its updates."""

    def leave_out(patch: pytest.MonkeyPatch, subject: Subject) -> None:
        owner: Any = subject.store
        *path, name = method.split(".")
        for part in path:
            owner = getattr(owner, part)
        patch.setattr(owner, name, lambda *args: None)

    return leave_out


def read_home(subject: Subject) -> Callable[[], float]:
    subject.begin()
    subject.store.slots.await_home(Chunk("param", 0))
    seen = float(subject.home()[0])
    return lambda: seen


def fill(subject: Subject) -> Callable[[], float]:
    subject.begin()
    subject.store.write(PARAM, "a", torch.full((NUMEL,), 5.0))
    return lambda: float(subject.home()[0])


def collect_a_gradient(subject: Subject) -> Callable[[], float]:
    """The update reads gradients that the user replaces meanwhile."""
    seen: list[float] = []

    def job() -> None:
        subject.gate.wait()
        seen.append(float(subject.home(GRAD)[0]))

    subject.store.updates.begin(0, HomeUpdate(job, "a"))
    subject.parameters["a"].grad = torch.full((NUMEL,), 7.0)
    subject.store.gradients.collect(0)
    return lambda: seen[0]


def place_on_the_tier(subject: Subject) -> Callable[[], float]:
    home = subject.home()  # keeps the memory alive, which is given back

    def job() -> None:
        subject.gate.wait()
        home.fill_(2.0)

    subject.store.updates.begin(0, HomeUpdate(job, "a"))
    subject.store.place(subject.layout, subject.parameters, frozenset({0}))
    return lambda: float(subject.parameters["a"].detach()[0])


WAITS = [
    Wait("await_home", read_home, ignoring("updates.wait"), 2.0, 1.0),
    Wait("fill", fill, ignoring("slots.await_home"), 5.0, 2.0),
    Wait("collect_gradients", collect_a_gradient, ignoring("updates.wait"), 0.0, 7.0),
    Wait("place", place_on_the_tier, ignoring("updates.finish"), 2.0, 1.0),
]


@pytest.mark.parametrize("left_out", [False, True], ids=["as it is", "without the wait"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("wait", WAITS, ids=str)
def test_a_wait_of_the_host_matters(wait: Wait, kind: str, left_out: bool) -> None:
    subject = Subject(kind)
    with pytest.MonkeyPatch.context() as patch:
        if left_out:
            wait.leave_out(patch, subject)
        else:
            opened_soon(subject.gate)
        see = wait.act(subject)
        subject.settle()
    subject.gate.opened.set()
    subject.store.updates.finish()
    subject.settle()
    assert see() == (wait.wrong if left_out else wait.right)


@pytest.mark.parametrize("left_out", [False, True], ids=["as it is", "without the order"])
def test_updates_begun_earlier_come_first(left_out: bool) -> None:
    """Two steps on the same gradients: the second update of a group is told to wait for nothing but the first."""
    subject = Subject("cpu")
    updates, home = subject.store.updates, subject.home()

    def first_job() -> None:
        subject.gate.wait()
        home.fill_(2.0)

    updates.begin(0, HomeUpdate(first_job, "first"))
    if left_out:
        (first,), other = updates.before(0), Subject("cpu").store.updates
        other.begin(0, HomeUpdate(lambda: home.mul_(3.0), "second, on a thread of its own"))
        other.finish()
        subject.gate.opened.set()
        first.wait()
    else:
        updates.begin(0, HomeUpdate(lambda: home.mul_(3.0), "second"))
        subject.gate.opened.set()
        updates.finish()
    assert float(home[0]) == (2.0 if left_out else 6.0)


# ---------------------------------------------------------------- updates that fail

pytestmark = pytest.mark.timeout(60)


def broken() -> None:
    raise ValueError("no such thing")


def test_a_failure_reaches_who_needs_the_chunk_with_its_name(subject: Subject) -> None:
    store = subject.store
    store.updates.begin(0, HomeUpdate(broken, "chunk param:0 (a)"))
    for _ in range(2):
        store.prefetch(Chunk("param", 0))
        with pytest.raises(StreamError, match=r"chunk param:0 \(a\) failed and may be half done: ValueError: no such"):
            store.slots.wait(Chunk("param", 0))
        with pytest.raises(StreamError):
            store.release_slots()
    store.prefetch(Chunk("param", 1))  # other chunks are as they were
    store.slots.wait(Chunk("param", 1))


def test_finish_tells_once_of_every_failure_and_waits_for_all() -> None:
    updates, ran = HomeUpdates(), []
    for group, label in enumerate(("first", "second", "third")):
        updates.begin(group, HomeUpdate(broken, label))
    updates.begin(3, HomeUpdate(lambda: ran.append(1), "last"))
    with pytest.raises(StreamError, match="first") as caught:
        updates.finish()
    assert [note.partition("the update of ")[2].split()[0] for note in caught.value.__notes__] == ["second", "third"]
    assert ran == [1]
    updates.finish()
    updates.wait(0)
    assert updates.before(0) == ()


def test_one_failed_copy_that_many_updates_wait_for_is_told_of_once() -> None:
    updates, arrived = HomeUpdates(), WorkerStream("to_home").submit(broken)
    for group in range(3):
        updates.begin(group, HomeUpdate(lambda: None, "it", [arrived]))
    with pytest.raises(StreamError, match="no such thing") as caught:
        updates.finish()
    assert not hasattr(caught.value, "__notes__")


def test_wait_tells_of_a_failure_again_and_again() -> None:
    updates = HomeUpdates()
    updates.begin(0, HomeUpdate(broken, "it"))
    for _ in range(2):
        with pytest.raises(StreamError, match="it failed"):
            updates.wait(0)
    updates.wait(1)


def test_gradients_that_never_arrived_are_not_used() -> None:
    def full() -> None:
        raise HomeError("the disk is full")

    updates, ran = HomeUpdates(), []
    arrived = WorkerStream("to_home").submit(full)
    updates.begin(0, HomeUpdate(lambda: ran.append(1), "it", [arrived]))
    with pytest.raises(HomeError, match="the disk is full"):
        updates.finish()
    assert not ran


# ---------------------------------------------------------------- Ctrl-C, wherever it comes


def note_when_opened(gate: Gate, ran: list[int]) -> None:
    """A job that stands still until the gate opens."""
    gate.wait()
    ran.append(1)


def test_an_interrupted_finish_forgets_no_failure() -> None:
    updates, gate = HomeUpdates(), Gate()
    updates.begin(0, HomeUpdate(raiser(ValueError("no such thing")), "the first"))
    updates.begin(1, HomeUpdate(gate.wait, "the second"))
    with pytest.raises(KeyboardInterrupt), ctrl_c_in_a_wait():
        updates.finish()
    gate.opened.set()
    with pytest.raises(StreamError, match="the first"):
        updates.finish()


class Interrupter:
    """A trace function: KeyboardInterrupt where Python may deliver a signal, at the `at`-th such place of this room.

    Python looks for signals after calls, at the beginning of functions and in loops.
    """

    DELIVERS = re.compile("CALL|RESUME|JUMP_BACKWARD")

    def __init__(self, at: int) -> None:
        self.left, self.delivered = at, False
        self.names: dict[CodeType, dict[int, str]] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in (updates_module.__file__, streams_module.__file__):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        names = self.names.get(frame.f_code)
        if names is None:
            names = self.names[frame.f_code] = {i.offset: i.opname for i in dis.get_instructions(frame.f_code)}
        delivers = [True]  # at the beginning of the function

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if event == "opcode":
                due, delivers[0] = delivers[0], bool(self.DELIVERS.match(names.get(frame.f_lasti, "")))
                self.left -= due
                if due and self.left == 0:
                    self.delivered = True
                    raise KeyboardInterrupt
            return trace

        return trace


@pytest.mark.parametrize("is_first", [True, False])
def test_an_update_that_is_interrupted_anywhere_as_it_begins_is_waited_for_or_never_runs(is_first: bool) -> None:
    outcomes = set()
    for at in range(1, 200):
        updates, gate, ran = HomeUpdates(), Gate(), list[int]()
        if not is_first:  # the thread is there
            updates.begin(1, HomeUpdate(lambda: None, ""))
            updates.finish()
        update = HomeUpdate(functools.partial(note_when_opened, gate, ran), "it")
        interrupter, former = Interrupter(at), sys.gettrace()
        sys.settrace(interrupter)
        try:
            updates.begin(0, update)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(former)
        has_begun = updates.has(0, update)
        assert bool(updates.before(0)) == has_begun
        gate.opened.set()
        updates.finish()
        assert len(ran) == has_begun
        updates._stream.drain()
        assert len(ran) == has_begun, "it ran, or ran again, after the last wait for it"
        outcomes.add((interrupter.delivered, has_begun))
        if not interrupter.delivered:
            break
    assert outcomes == {(True, False), (True, True), (False, True)}
