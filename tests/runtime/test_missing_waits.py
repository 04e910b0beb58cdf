"""Each wait left out once: wrong results, or an illegal state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from harness import (
    TINY,
    Arrays,
    adamw,
    array,
    compile_case,
    differences,
    gradients,
    graphs_made,
    refuse,
    session_of,
    weights,
)
from late_tiers import Factory, LateTier, tier_of_new_sessions
from plain_modules import Stack
from zoo import Case, floats

from chunkc.ir.errors import ChunkStateError
from chunkc.runtime import executor
from chunkc.runtime.chunk_states import ChunkState, advance
from chunkc.runtime.store import ChunkStore
from chunkc.runtime.tier import CpuTier

pytestmark = pytest.mark.timeout(120)


# One chunk each, small enough to be updated in one piece.
STACK = Case("stack", lambda: Stack(bias=False), lambda seed: {"x": floats(seed, (4, 64))})


@dataclasses.dataclass(frozen=True)
class Wait:
    """A wait in the instructions of a phase.

    Attributes:
        index: among the phase's instructions.
        way: "in" behind a prefetch, "out" behind a write-back.
    """

    phase: str
    index: int
    chunk: str
    way: str

    @property
    def kind(self) -> str:
        return f"{self.phase} {self.way} {self.chunk.partition(':')[0]}"


def waits_of(phase: str, executable: executor.Executable) -> list[Wait]:
    found, way = [], {}
    for index, instruction in enumerate(executable.instructions):
        if isinstance(instruction, executor._Event):
            if instruction.method == "wait":
                found.append(Wait(phase, index, instruction.chunk, way[instruction.chunk]))
            else:
                way[instruction.chunk] = {"prefetch": "in", "write_back": "out"}.get(instruction.method, "none")
    return found


def without(executable: executor.Executable, wait: Wait, *, forced: bool) -> executor.Executable:
    """The instructions with one wait left out; `forced`: the chunk's state goes on as if it were there."""
    instructions = list(executable.instructions)
    instructions[wait.index : wait.index + 1] = [executor._Event("force_state", wait.chunk)] if forced else []
    return dataclasses.replace(executable, instructions=tuple(instructions))


def force_state(store: ChunkStore, chunk: str) -> None:
    """`ChunkStore.wait` that does not wait."""
    slot = store.slot(chunk)
    if slot.state in (ChunkState.PREFETCHING, ChunkState.EVICTING):
        slot.state = advance(chunk, slot.state, ChunkState.HOLD)


class Subject:
    """A small model, compiled once, whose second step is run again and again from the same state.

    Forward, a backward that accumulates onto gradients which are there already, and an optimizer step.
    """

    def __init__(self, factory: Factory) -> None:
        with tier_of_new_sessions(factory):
            budget = refuse(STACK, memory_budget=TINY).minimum_nbytes
            # verify=False: what is left out here, the verifier would find.
            self.model, self.compiled = compile_case(
                STACK, memory_budget=budget, whole_graph="never", debug=True, verify=False
            )
        self.optimizer = adamw(self.model.parameters())
        with graphs_made() as made:
            self.compiled(**STACK.batch(0)).backward()
        (self.graph,) = made
        self.optimizer.step()
        self.session = session_of(self.model)
        assert self.session.store.debug
        # Copied by hand: `state_dict` would not be the very home views again.
        self.tensors = [t.detach() for p in self.model.parameters() for t in (p, p.grad)]
        self.tensors += [t for state in self.optimizer.state.values() for t in state.values()]
        self.start = [t.clone() for t in self.tensors]
        self.expected = self.step()

    def restore(self) -> None:
        self.session.store.release_slots()
        self.session.store.tier.drain()
        addresses = iter(self.tensors)
        for p in self.model.parameters():
            next(addresses)
            p.grad = next(addresses)
        with torch.no_grad():
            for tensor, value in zip(self.tensors, self.start):
                tensor.copy_(value)

    def step(self) -> tuple[np.ndarray, Arrays, Arrays, Arrays]:
        """Loss, gradients, weights, states after one step from the start."""
        self.restore()
        loss = self.compiled(**STACK.batch(1))
        loss.backward()
        self.session.store.tier.drain()
        grads = gradients(self.model)
        self.optimizer.step()
        self.session.store.tier.drain()
        states = {
            f"{index}.{kind}": array(tensor)
            for index, state in enumerate(self.optimizer.state.values())
            for kind, tensor in state.items()
        }
        return array(loss), grads, weights(self.model), states

    def executables(self) -> dict[str, executor.Executable]:
        """The ones the last step ran, by phase."""
        records = self.session.records
        found = {}
        for phase in ("forward", "backward"):
            plans = self.graph.steps.at(phase, (), may_be_whole=True).plans.values()
            (planned,) = [step for step in plans if step.plan is records[phase].plan]
            found[phase] = planned.phases[phase].executable
        (found["update"],) = [e for e, plan, _ in self.session.update_plans.values() if plan is records["update"].plan]
        return found

    def waits(self) -> list[Wait]:
        return [wait for phase, executable in self.executables().items() for wait in waits_of(phase, executable)]

    def outcome_without(self, wait: Wait, *, forced: bool) -> tuple[list[str], BaseException | None]:
        """How a step without that wait differs from one with it; or the error it raised."""
        return self.outcome_with(wait.phase, without(self.executables()[wait.phase], wait, forced=forced))

    def outcome_with(self, phase: str, broken: executor.Executable) -> tuple[list[str], BaseException | None]:
        """How a step differs in which `broken` runs instead of a phase's own instructions; or its error."""
        target = self.executables()[phase]
        run, ran = executor.Executable.__call__, []

        def swapped(executable: executor.Executable, *args: Any) -> list[Any]:
            if executable is target:
                ran.append(phase)
                executable = broken
            return run(executable, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor.Executable, "__call__", swapped)
            patch.setattr(ChunkStore, "force_state", force_state, raising=False)
            try:
                found = differences(self.step(), self.expected)
            except ChunkStateError as error:
                found, problem = [], error.with_traceback(None)
            else:
                problem = None
        assert ran == [phase]
        return found, problem


@pytest.fixture(scope="module")
def late() -> Iterator[Subject]:
    subject = Subject(LateTier)
    yield subject
    assert not differences(subject.step(), subject.expected)  # the broken steps left nothing behind


class Delay:
    """Seconds before each copy: none, but from `slow` to `fast` surely longer than a small segment runs."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def slow(self, chunk: str) -> None:
        self.now_s = 0.2

    def fast(self, chunk: str) -> None:
        self.now_s = 0.0


KINDS = (
    "forward in param",
    "backward in param",
    "backward in grad",
    "backward out grad",
    "update in param",
    "update in grad",
    "update in exp_avg",
    "update in exp_avg_sq",
    "update out param",
    "update out exp_avg",
    "update out exp_avg_sq",
)


def test_the_step_that_is_broken_below_is_repeatable(late: Subject) -> None:
    for _ in range(2):
        assert not differences(late.step(), late.expected)
    loss, grads, weights_after, _ = late.expected
    assert np.isfinite(loss)
    assert all(np.isfinite(a).all() for a in (*grads.values(), *weights_after.values()))


def test_every_kind_of_wait_is_in_the_plan(late: Subject) -> None:
    assert {wait.kind for wait in late.waits()} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_wait_matters(late: Subject, kind: str) -> None:
    """Each single wait of that kind, left out with the state forced on: NaN or stale data in the result."""
    waits = [wait for wait in late.waits() if wait.kind == kind]
    assert waits
    for wait in waits:
        found, error = late.outcome_without(wait, forced=True)
        assert error is None
        assert found, f"nothing differs without {wait}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_missing_wait_is_an_illegal_state(late: Subject, kind: str) -> None:
    """The same with the states as they are: refused, whatever the copies do, and the model is as before."""
    for wait in [wait for wait in late.waits() if wait.kind == kind]:
        found, error = late.outcome_without(wait, forced=False)
        assert not found
        assert isinstance(error, ChunkStateError), f"{wait} can be left out"
        assert wait.chunk in str(error)
        assert late.session.store.present == frozenset()


def test_a_write_back_that_is_left_out_is_refused(late: Subject) -> None:
    """Not a wait, but what the wait is for: a dirty slot is never given back."""
    for phase in ("backward", "update"):
        executable = late.executables()[phase]
        (index, *_), (event, *_) = zip(
            *[
                (i, e)
                for i, e in enumerate(executable.instructions)
                if isinstance(e, executor._Event) and e.method == "write_back"
            ]
        )
        _, error = late.outcome_without(Wait(phase, index, event.chunk, "out"), forced=False)
        assert error is not None
        assert "before it was written back" in str(error)


def _is(instruction: object, methods: tuple[str, ...], chunk: str | None = None) -> bool:
    return (
        isinstance(instruction, executor._Event)
        and instruction.method in methods
        and chunk in (None, instruction.chunk)
    )


def span(executable: executor.Executable, wait: Wait) -> tuple[int, int]:
    """Where the copy is submitted, and where it must be done: a call that may read it, or the slot's end."""
    events = executable.instructions
    begin = max(i for i in range(wait.index) if _is(events[i], ("prefetch", "write_back"), wait.chunk))
    for index in range(wait.index + 1, len(events)):
        called = isinstance(events[index], executor._Call | executor._Update)
        if _is(events[index], ("evict",), wait.chunk) or (wait.way == "in" and called):
            return begin, index
    raise AssertionError(f"{wait.chunk} stays in its slot")


def shows_by_the_clock(executable: executor.Executable, wait: Wait) -> bool:
    """Whether nothing else makes the copy done in time.

    Copies of one way keep their order: once a later one was waited for, this one is done too. `LateTier`
    knows no such mercy.
    """
    begin, end = span(executable, wait)
    submits = ("prefetch",) if wait.way == "in" else ("write_back",)
    later: set[str] = set()
    for event in executable.instructions[begin + 1 : end]:
        if _is(event, submits):
            later.add(event.chunk)  # type: ignore[attr-defined]
        elif _is(event, ("wait",)) and event.chunk in later:  # type: ignore[attr-defined]
            return False
    return True


def slow_without(executable: executor.Executable, wait: Wait) -> executor.Executable:
    """`without`, forced, and the copy is slow."""
    events = executable.instructions
    begin, end = span(executable, wait)
    slow, force, fast = (executor._Event(method, wait.chunk) for method in ("slow", "force_state", "fast"))
    before, between, after = events[:begin], events[begin : wait.index], events[wait.index + 1 : end + 1]
    instructions = (*before, slow, *between, force, *after, fast, *events[end + 1 :])
    return dataclasses.replace(executable, instructions=instructions)


def test_a_missing_wait_shows_with_real_threads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first wait of every kind that the order inside a stream does not hide."""
    delay = Delay()
    monkeypatch.setattr(ChunkStore, "slow", lambda store, chunk: delay.slow(chunk), raising=False)
    monkeypatch.setattr(ChunkStore, "fast", lambda store, chunk: delay.fast(chunk), raising=False)
    subject = Subject(lambda: CpuTier(delay=delay))
    executables = subject.executables()
    waits: dict[str, Wait] = {}
    for wait in subject.waits():
        if shows_by_the_clock(executables[wait.phase], wait):
            waits.setdefault(wait.kind, wait)
    assert {(wait.phase, wait.way) for wait in waits.values()} == {
        ("forward", "in"), ("backward", "in"), ("backward", "out"), ("update", "in"), ("update", "out"),
    }  # fmt: skip
    for wait in waits.values():
        found, error = subject.outcome_with(wait.phase, slow_without(subject.executables()[wait.phase], wait))
        assert error is None
        assert found, f"nothing differs without {wait}"
    assert not differences(subject.step(), subject.expected)
