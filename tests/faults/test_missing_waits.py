"""Each wait left out once: wrong results, or an illegal state."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import pytest
from harness import TINY, Arrays, array, compile_case, differences, gradients, refuse, session_of
from late_tiers import LateTier, tier_of_new_sessions
from missing_waits import KINDS, KINDS_IN_BACKWARD, Subject, Wait
from plain_modules import Stack
from zoo import Case, floats

from chunkc.ir.errors import ChunkStateError
from chunkc.runtime.execution import executor, saved_instructions

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def late(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """A step with updates after the backward, or in it; `request.param`: the `overlap` of `chunkc.optim.AdamW`."""
    subject = Subject(LateTier, overlap=request.param)
    yield subject
    assert not differences(subject.step(), subject.expected)  # the broken steps left nothing behind


updated_after_the_backward = pytest.mark.parametrize("late", ["none"], indirect=True)


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


# ---------------------------------------------------------------- saved values


STACK = Case("stack", lambda: Stack(bias=False), lambda seed: {"x": floats(seed, (64, 64))})
"""Values of 16 KiB."""


@pytest.mark.second_tier
def test_every_wait_for_a_saved_value_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    with tier_of_new_sessions(LateTier):
        budget = refuse(STACK, memory_budget=TINY, activations="offload").minimum_nbytes
        model, compiled = compile_case(STACK, memory_budget=budget, activations="offload", debug=True, verify=False)

        def step() -> tuple[Any, Arrays]:
            model.zero_grad()
            loss = compiled(**STACK.batch(0))
            loss.backward()
            session_of(model).store.tier.drain()
            return array(loss), gradients(model)

        expected, hold_for, waits = step(), saved_instructions._hold_for, []

        def noted(storage: str, run: Any) -> None:
            waits.append(storage)
            hold_for(storage, run)

        monkeypatch.setattr(saved_instructions, "_hold_for", noted)
        assert not differences(step(), expected)
        num_waits = len(waits)
        assert num_waits >= 8
        assert num_waits == 2 * len(set(waits)), "each storage goes home and comes back"
        for left_out in range(num_waits):
            waits.clear()

            def leaving_one_out(storage: str, run: Any, left_out: int = left_out) -> None:
                waits.append(storage)
                if len(waits) - 1 == left_out:
                    run.saved.under_way.pop(storage)
                else:
                    hold_for(storage, run)

            monkeypatch.setattr(saved_instructions, "_hold_for", leaving_one_out)
            try:
                shows = bool(differences(step(), expected))
            except (LookupError, AttributeError, TypeError):  # nothing has been copied, or there is nothing to copy
                shows = True
            assert shows, f"nothing shows that wait {left_out}, for {waits[left_out]}, is missing"
            monkeypatch.setattr(saved_instructions, "_hold_for", hold_for)
            session_of(model).store.release_slots()
        assert not differences(step(), expected)
