"""Each wait for an update at home left out once: what is read or kept then is wrong; with the wait it is right.

An update stands still until a gate opens. With the wait in place the gate opens while somebody waits; without it, when
everybody else is through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from store_cases import NUMEL, Subject, opened_soon

from chunkc.ir.layout import GRAD, PARAM, Chunk
from chunkc.runtime.device.updates import HomeUpdate

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
