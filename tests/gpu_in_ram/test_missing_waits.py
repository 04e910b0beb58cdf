"""Each wait between streams left out once, on late streams, with arithmetic: the results are others.

Two edges order all bytes (`runtime.tier`): computation after the copy that it needs, in or out, and a copy after the
computation before it. A gate stands where the wait was: what should have been waited for is held back until what
should have waited is through. Released slots are filled with NaN, so that nobody reads them unpunished.

Some waits only say what the order inside a stream makes sure of anyway. The step's instructions tell which ones;
without those no bit changes, though what they were for is late.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from unittest import mock

import cuda_in_ram
import pytest
import torch
from device_gate import Gate
from harness import differences
from missing_waits import KINDS, Inserted, Subject, Wait, is_event, shows_by_the_clock, slow_without, span

from chunkc.runtime.device.cuda import CudaTier
from chunkc.runtime.execution import executor

pytestmark = [pytest.mark.arithmetic, pytest.mark.timeout(600)]

AT_MOST_S = 5.0
"""How long a gate is shut at most: what stands behind it may be what would open it."""

HIDDEN_S = 0.05
"""How late something is of which nobody should notice."""


@pytest.fixture
def subject() -> Iterator[Subject]:
    with cuda_in_ram.choose(late=1, late_us=0):
        made = Subject(None, "cuda")
        assert isinstance(made.session.store.tier, CudaTier)
        yield made
        assert not differences(made.step(), made.expected)  # the broken steps left nothing behind


def copy_stream(subject: Subject, wait: Wait) -> torch.cuda.Stream:
    """Where the copy is made that `wait` is for."""
    executable = subject.executables[wait.phase]
    submitted, _ = span(executable, wait)
    return subject.session.store.tier.links[executable.instructions[submitted].link]._stream


def test_computation_that_does_not_wait_for_a_copy(subject: Subject) -> None:
    """Every wait of the step. The order of copies inside a stream hides some: a later one was waited for."""
    gate, shown, hidden = Gate(at_most_s=AT_MOST_S), [], []
    assert {wait.kind for wait in subject.waits()} == set(KINDS)
    for wait in subject.waits():
        executable, stream = subject.executables[wait.phase], copy_stream(subject, wait)
        shows = shows_by_the_clock(executable, wait)

        def slow(stream: torch.cuda.Stream = stream, shows: bool = shows) -> None:
            gate.shut(stream)
            if not shows:
                gate.open_soon()

        def fast(shows: bool = shows) -> None:
            if shows:
                gate.open_after(torch.cuda.current_stream(), AT_MOST_S / 2)

        found, error = subject.outcome_with(wait.phase, slow_without(executable, wait, slow, fast))
        assert error is None
        assert bool(found) == shows, f"without {wait}: {found}"
        (shown if shows else hidden).append(wait)
    assert len(shown) > len(hidden) > 0
    assert {(wait.phase, wait.way) for wait in shown} == {
        ("forward", "in"), ("backward", "in"), ("backward", "out"), ("update", "in"), ("update", "out"),
    }  # fmt: skip
    assert {wait.way for wait in hidden} == {"in"}


def test_a_copy_that_does_not_wait_for_computation(subject: Subject) -> None:
    """Every copy of the step: a prefetch into a slot that is still being filled with NaN, a write-back of what is not
    computed yet. A write-back behind another one of the same call needs no wait of its own."""
    for wait in subject.waits():
        shows = wait.way == "in" or is_first_out(subject, wait)
        found, error = subject.outcome_with(wait.phase, at_once(subject, wait, AT_MOST_S / 2 if shows else HIDDEN_S))
        assert error is None
        assert bool(found) == shows, f"where the copy of {wait} waits for nothing: {found}"


def is_first_out(subject: Subject, wait: Wait) -> bool:
    """Whether no copy home that was submitted since the last call stands before it in its stream, and waits for it."""
    executable = subject.executables[wait.phase]
    submitted, _ = span(executable, wait)
    since = executable.instructions[last_call(executable, submitted) : submitted]
    return not any(is_event(event, (executor._WriteBack,)) for event in since)


def last_call(executable: executor.Executable, before: int) -> int:
    """The last instruction that computes, before another."""
    instructions = executable.instructions[:before]
    return max(i for i, found in enumerate(instructions) if isinstance(found, executor._Call | executor._Update))


def at_once(subject: Subject, wait: Wait, at_most_s: float) -> executor.Executable:
    """The phase's instructions, where the copy that `wait` is for starts before the computation before it is over.

    Args:
        at_most_s: how long that computation is held back for it.
    """
    executable = subject.executables[wait.phase]
    gate, tier = Gate(at_most_s=AT_MOST_S), subject.session.store.tier
    events = executable.instructions
    submitted, _ = span(executable, wait)
    # A write-back comes behind the call that filled the slot, a prefetch behind the NaN that its slot is filled with.
    held_back = submitted if wait.way == "in" else last_call(executable, submitted)

    store = subject.session.store

    def submit() -> None:
        with mock.patch.object(tier, "mark", return_value=()):
            (store.prefetch if wait.way == "in" else store.write_back)(wait.chunk, events[submitted].link)
        copy = store.slots.slot(wait.chunk).copy
        if copy is not None:
            give_up_s = time.monotonic() + at_most_s
            while not copy.done() and time.monotonic() < give_up_s:
                time.sleep(0.001)
        gate.open()

    shut = Inserted(lambda: gate.shut(torch.cuda.current_stream()))
    early = Inserted(submit)
    instructions = (*events[:held_back], shut, *events[held_back:submitted], early, *events[submitted + 1 :])
    return dataclasses.replace(executable, instructions=instructions)
