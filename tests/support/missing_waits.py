"""A training step with one of its waits left out, for the tests of every place that it runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from harness import TINY, Arrays, array, compile_case, differences, gradients, refuse, session_of, weights
from late_tiers import Factory, tier_of_new_sessions
from plain_modules import Stack
from zoo import Case, floats

import chunkc
from chunkc.ir.errors import ChunkStateError
from chunkc.ir.layout import Chunk
from chunkc.runtime.execution import executor
from chunkc.runtime.execution.run import Run
from chunkc.runtime.store.slots import ChunkState, advance


# One chunk each, small enough to be updated in one piece.
def stack(device: str) -> Case:
    return Case("stack", lambda: Stack(bias=False), lambda seed: {"x": floats(seed, (4, 64)).to(device)})


@dataclasses.dataclass(frozen=True)
class Wait:
    """A wait in the instructions of a phase.

    Attributes:
        index: among the phase's instructions.
        way: "in" behind a prefetch, "out" behind a write-back.
    """

    phase: str
    index: int
    chunk: Chunk
    way: str

    @property
    def kind(self) -> str:
        return f"{self.phase} {self.way} {self.chunk.kind}"


ROOM_FOR_UPDATES_NBYTES = 40_000
"""On top of the smallest budget, for updates in the backward."""

WAYS = {executor._Prefetch: "in", executor._WriteBack: "out", executor._Evict: "none"}


def waits_of(phase: str, executable: executor.Executable) -> list[Wait]:
    found, way = [], {}
    for index, instruction in enumerate(executable.instructions):
        if isinstance(instruction, executor._Wait):
            found.append(Wait(phase, index, instruction.chunk, way[instruction.chunk]))
        elif isinstance(instruction, tuple(WAYS)):
            way[instruction.chunk] = WAYS[type(instruction)]
    return found


def without(executable: executor.Executable, wait: Wait, *, forced: bool) -> executor.Executable:
    """Return the instructions with one wait left out; `forced`: the chunk's state goes on as if it were there."""
    instructions = list(executable.instructions)
    instructions[wait.index : wait.index + 1] = [ForcedState(wait.chunk)] if forced else []
    return dataclasses.replace(executable, instructions=tuple(instructions))


@dataclasses.dataclass(frozen=True)
class ForcedState:
    """The instruction to wait, which does not wait."""

    chunk: Chunk

    def __call__(self, registers: object, run: Run) -> None:
        slot = run.store.slots.slot(self.chunk)
        if slot.state in (ChunkState.PREFETCHING, ChunkState.EVICTING):
            slot.state = advance(self.chunk, slot.state, ChunkState.HOLD)


@dataclasses.dataclass(frozen=True)
class Inserted:
    """An instruction that calls a function."""

    do: Callable[[], object]

    def __call__(self, registers: object, run: Run) -> None:
        self.do()


@contextmanager
def calls_of(kind: type) -> Iterator[list[Any]]:
    """Yield the objects of a class that are called inside, in order."""
    called: list[Any] = []
    call = kind.__call__

    def noting(self: Any, *args: Any) -> Any:
        called.append(self)
        return call(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__call__", noting)
        yield called


class Subject:
    """A small model, compiled once, with a second step that is repeated from the same state.

    Forward, a backward that accumulates onto gradients which are there already, and an optimizer step; or, where
    updates overlap the backward, a backward that updates.

    Attributes:
        executables: what a step runs, by phase.

    Args:
        factory: makes the tier; None: the device's own.
        device: where the model computes.
        overlap: "none" or "backward", as in `chunkc.optim.AdamW`.
    """

    def __init__(self, factory: Factory | None, device: str = "cpu", overlap: str = "none") -> None:
        self.case, self.updates_in_backward = stack(device), overlap == "backward"
        with nullcontext() if factory is None else tier_of_new_sessions(factory):
            budget = refuse(self.case, memory_budget=TINY, device=device).minimum_nbytes
            budget += ROOM_FOR_UPDATES_NBYTES if self.updates_in_backward else 0
            # verify=False: what is left out here, the verifier would find.
            self.model, self.compiled = compile_case(
                self.case, memory_budget=budget, device=device, whole_graph="never", debug=True, verify=False
            )
        self.optimizer = chunkc.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1, overlap=overlap)
        self.compiled(**self.case.batch(0)).backward()
        self.optimizer.step()
        self.session = session_of(self.model)
        assert self.session.store.slots.debug
        # Copied by hand: `state_dict` would not be the very home views again.
        self.gradients = [] if self.updates_in_backward else [p.grad for p in self.model.parameters()]
        self.tensors = [*(p.detach() for p in self.model.parameters()), *self.gradients]
        self.tensors += [t for state in self.optimizer.state.values() for t in state.values()]
        self.start = [t.clone() for t in self.tensors]
        self.step()
        with calls_of(executor.Executable) as ran:
            self.expected = self.step()
        phases = ("forward", "backward") if self.updates_in_backward else ("forward", "backward", "update")
        self.executables = dict(zip(phases, ran, strict=True))

    def restore(self) -> None:
        self.session.store.release_slots()
        self.session.store.tier.drain()
        if self.updates_in_backward:
            self.optimizer.scheduler.in_session(self.session).abandon()
            self.optimizer.zero_grad()
        for parameter, gradient in zip(self.model.parameters(), self.gradients):
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, value in zip(self.tensors, self.start):
                tensor.copy_(value)

    def step(self) -> tuple[np.ndarray, Arrays, Arrays, Arrays]:
        """Return loss, gradients, weights and states after one step from the start."""
        self.restore()
        loss = self.compiled(**self.case.batch(1))
        loss.backward()
        self.session.store.tier.drain()
        grads = {} if self.updates_in_backward else gradients(self.model)  # consumed
        self.optimizer.step()
        self.session.store.tier.drain()
        states = {
            f"{index}.{kind}": array(tensor)
            for index, state in enumerate(self.optimizer.state.values())
            for kind, tensor in state.items()
        }
        return array(loss), grads, weights(self.model), states

    def waits(self) -> list[Wait]:
        return [wait for phase, executable in self.executables.items() for wait in waits_of(phase, executable)]

    def outcome_without(self, wait: Wait, *, forced: bool) -> tuple[list[str], BaseException | None]:
        """Difference between a step without that wait and one with it; or the error it raised."""
        return self.outcome_with(wait.phase, without(self.executables[wait.phase], wait, forced=forced))

    def outcome_with(self, phase: str, broken: executor.Executable) -> tuple[list[str], BaseException | None]:
        """Difference of a step in which `broken` runs instead of a phase's own instructions; or its error."""
        target = self.executables[phase]
        run, ran = executor.Executable.__call__, []

        def swapped(executable: executor.Executable, *args: Any) -> list[Any]:
            if executable is target:
                ran.append(phase)
                executable = broken
            return run(executable, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor.Executable, "__call__", swapped)
            try:
                found = differences(self.step(), self.expected)
            except ChunkStateError as error:
                found, problem = [], error.with_traceback(None)
            else:
                problem = None
        assert ran == [phase]
        return found, problem


KINDS = (
    "forward in param", "backward in param", "backward in grad", "backward out grad", "update in param",
    "update in grad", "update in exp_avg", "update in exp_avg_sq", "update out param", "update out exp_avg",
    "update out exp_avg_sq",
)  # fmt: skip

KINDS_IN_BACKWARD = (
    "forward in param", "backward in param", "backward in grad", "backward in exp_avg", "backward in exp_avg_sq",
    "backward out param", "backward out exp_avg", "backward out exp_avg_sq",
)  # fmt: skip
"""Where the backward updates: gradients do not go home."""


def is_event(instruction: object, events: tuple[type, ...], chunk: Chunk | None = None) -> bool:
    return isinstance(instruction, events) and chunk in (None, instruction.chunk)  # type: ignore[attr-defined]


def span(executable: executor.Executable, wait: Wait) -> tuple[int, int]:
    """Return the index of the instruction that submits the copy, and of the one before which it must be done.

    The latter is the first that reads the chunk, a call or a gradient's sum, or the end of its slot.
    """
    events = executable.instructions
    submits = (executor._Prefetch, executor._WriteBack)
    begin = max(i for i in range(wait.index) if is_event(events[i], submits, wait.chunk))
    for index in range(wait.index + 1, len(events)):
        event = events[index]
        if wait.kind == "backward in grad":
            reads = isinstance(event, executor._Sink) and event.chunk == wait.chunk
        else:
            reads = wait.way == "in" and isinstance(event, executor._Call | executor._Update)
        if is_event(event, (executor._Evict,), wait.chunk) or reads:
            return begin, index
    raise AssertionError(f"{wait.chunk} stays in its slot")


def shows_by_the_clock(executable: executor.Executable, wait: Wait) -> bool:
    """Whether only this wait makes sure that the copy is done in time.

    Copies of one direction keep their order: once a later one was waited for, this one is done too. `LateTier` does not
    keep that order.
    """
    begin, end = span(executable, wait)
    submits = (executor._Prefetch,) if wait.way == "in" else (executor._WriteBack,)
    later: set[Chunk] = set()
    for event in executable.instructions[begin + 1 : end]:
        if is_event(event, submits):
            later.add(event.chunk)  # type: ignore[attr-defined]
        elif is_event(event, (executor._Wait,)) and event.chunk in later:  # type: ignore[attr-defined]
            return False
    return True


def slow_without(
    executable: executor.Executable, wait: Wait, slow: Callable[[], None], fast: Callable[[], None]
) -> executor.Executable:
    """Return the instructions `without` the wait, forced, and with a slow copy.

    `slow` is called before the copy is submitted, `fast` once it is too late.
    """
    events = executable.instructions
    begin, end = span(executable, wait)
    before_copy, force, after_use = Inserted(slow), ForcedState(wait.chunk), Inserted(fast)
    before, between, after = events[:begin], events[begin : wait.index], events[wait.index + 1 : end + 1]
    instructions = (*before, before_copy, *between, force, *after, after_use, *events[end + 1 :])
    return dataclasses.replace(executable, instructions=instructions)
