"""Each wait left out once: wrong results, or an illegal state."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import pytest
from harness import differences
from late_tiers import LateTier
from missing_waits import KINDS, KINDS_IN_BACKWARD, Subject, Wait, shows_by_the_clock, slow_without

from chunkc.ir.errors import ChunkStateError
from chunkc.runtime.device.tier import CpuTier
from chunkc.runtime.execution import executor

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def late(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """A step with updates after the backward, or in it; `request.param`: the `overlap` of `chunkc.optim.AdamW`."""
    subject = Subject(LateTier, overlap=request.param)
    yield subject
    assert not differences(subject.step(), subject.expected)  # the broken steps left nothing behind


updated_after_the_backward = pytest.mark.parametrize("late", ["none"], indirect=True)


class Delay:
    """Seconds before each copy: none, but from `slow` to `fast` surely longer than a small segment runs."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def slow(self) -> None:
        self.now_s = 0.2

    def fast(self) -> None:
        self.now_s = 0.0


@updated_after_the_backward
def test_the_step_that_is_broken_below_is_repeatable(late: Subject) -> None:
    for _ in range(2):
        assert not differences(late.step(), late.expected)
    loss, grads, weights_after, _ = late.expected
    assert np.isfinite(loss)
    assert all(np.isfinite(a).all() for a in (*grads.values(), *weights_after.values()))


@pytest.mark.parametrize(
    ("late", "kinds"),
    [("none", KINDS), pytest.param("backward", KINDS_IN_BACKWARD, marks=pytest.mark.second_tier)],
    indirect=["late"],
)
def test_every_kind_of_wait_is_in_the_plan(late: Subject, kinds: Collection[str]) -> None:
    assert {wait.kind for wait in late.waits()} == set(kinds)


each_wait = pytest.mark.parametrize(
    ("late", "kind"),
    [
        *(("none", kind) for kind in KINDS),
        *(pytest.param("backward", kind, marks=pytest.mark.second_tier) for kind in KINDS_IN_BACKWARD),
    ],
    indirect=["late"],
)


@each_wait
def test_every_wait_matters(late: Subject, kind: str) -> None:
    """Each single wait of that kind, left out with the state forced on: NaN or stale data in the result."""
    waits = [wait for wait in late.waits() if wait.kind == kind]
    assert waits
    for wait in waits:
        found, error = late.outcome_without(wait, forced=True)
        assert error is None
        if late.updates_in_backward and kind == "backward in grad":
            continue  # its slot has nothing to read from home
        assert found, f"nothing differs without {wait}"


@each_wait
def test_every_missing_wait_is_an_illegal_state(late: Subject, kind: str) -> None:
    """The same with the states as they are: refused, whatever the copies do, and the model is as before."""
    for wait in [wait for wait in late.waits() if wait.kind == kind]:
        found, error = late.outcome_without(wait, forced=False)
        assert not found
        assert isinstance(error, ChunkStateError), f"{wait} can be left out"
        assert str(wait.chunk) in str(error)
        assert late.session.store.slots.present == frozenset()


@updated_after_the_backward
def test_a_write_back_that_is_left_out_is_refused(late: Subject) -> None:
    """Not a wait, but what the wait is for: a dirty slot is never given back."""
    for phase in ("backward", "update"):
        executable = late.executables[phase]
        (index, *_), (event, *_) = zip(
            *[(i, e) for i, e in enumerate(executable.instructions) if isinstance(e, executor._WriteBack)]
        )
        _, error = late.outcome_without(Wait(phase, index, event.chunk, "out"), forced=False)
        assert error is not None
        assert "before it was written back" in str(error)


def test_a_missing_wait_shows_with_real_threads_too() -> None:
    """The first wait of every kind that the order inside a stream does not hide."""
    delay = Delay()
    subject = Subject(lambda: CpuTier(delay=delay))
    executables = subject.executables
    waits: dict[str, Wait] = {}
    for wait in subject.waits():
        if shows_by_the_clock(executables[wait.phase], wait):
            waits.setdefault(wait.kind, wait)
    assert {(wait.phase, wait.way) for wait in waits.values()} == {
        ("forward", "in"), ("backward", "in"), ("backward", "out"), ("update", "in"), ("update", "out"),
    }  # fmt: skip
    for wait in waits.values():
        broken = slow_without(subject.executables[wait.phase], wait, delay.slow, delay.fast)
        found, error = subject.outcome_with(wait.phase, broken)
        assert error is None
        assert found, f"nothing differs without {wait}"
    assert not differences(subject.step(), subject.expected)
