"""Updates in the backward whose copies come late: each kind of wait, left out once, shows in the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import TINY, array, compile_case, differences, graphs_made, refuse, session_of
from late_tiers import LateTier, tier_of_new_sessions
from plain_modules import Stack
from zoo import Case, floats

import chunkc
from chunkc.ir.errors import ChunkStateError
from chunkc.runtime.execution import executor
from chunkc.runtime.store.chunk_states import ChunkState, advance

pytestmark = [pytest.mark.second_tier, pytest.mark.timeout(300)]

STACK = Case("stack", lambda: Stack(bias=False), lambda seed: {"x": floats(seed, (4, 64))})

KINDS = (
    *("in param", "in grad", "in exp_avg", "in exp_avg_sq"),
    *("out param", "out exp_avg", "out exp_avg_sq"),
)
"""Of waits in a backward that updates: gradients do not go home."""

WAYS = {executor._prefetch: "in", executor._write_back: "out"}


def force_state(store: Any, chunk: Any, link: str) -> None:
    """`ChunkStore.wait` that does not wait."""
    slot = store.slot(chunk)
    if slot.state in (ChunkState.PREFETCHING, ChunkState.EVICTING):
        slot.state = advance(chunk, slot.state, ChunkState.HOLD)


class Subject:
    """A small model whose second step is run again and again from the same state."""

    def __init__(self) -> None:
        with tier_of_new_sessions(LateTier):
            budget = refuse(STACK, memory_budget=TINY).minimum_nbytes + 40_000
            self.model, self.compiled = compile_case(
                STACK, memory_budget=budget, whole_graph="never", debug=True, verify=False
            )  # verify=False: what is left out here, the verifier would find
        self.optimizer = chunkc.optim.AdamW(self.model.parameters(), lr=1e-2, overlap="backward")
        with graphs_made() as made:
            self.compiled(**STACK.batch(0)).backward()
        (self.graph,) = made
        self.optimizer.step()
        self.session = session_of(self.model)
        self.tensors = [p.detach() for p in self.model.parameters()]
        self.tensors += [t for state in self.optimizer.state.values() for t in state.values()]
        self.start = [t.clone() for t in self.tensors]
        self.expected = self.step()

    def step(self) -> list[Any]:
        """Loss, weights and states after one step from the start."""
        self.session.store.release_slots()
        self.session.store.tier.drain()
        self.optimizer.scheduler.end()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for tensor, value in zip(self.tensors, self.start, strict=True):
                tensor.copy_(value)
        loss = self.compiled(**STACK.batch(1))
        loss.backward()
        self.optimizer.step()
        self.session.store.tier.drain()
        return [array(t) for t in (loss, *self.tensors)]

    @property
    def backward(self) -> executor.Executable:
        """What the last step's backward ran."""
        plan = self.session.records.latest["backward"].plan
        assert plan.phases[-1].updated
        plans = self.graph.steps.at("backward", (), can_skip_segmentation=True).plans.values()
        return next(step for step in plans if step.plan is plan).phases["backward"].executable

    def waits(self) -> dict[str, list[int]]:
        """Places of waits, by kind."""
        found: dict[str, list[int]] = {}
        way: dict[Any, str] = {}
        for index, instruction in enumerate(self.backward.instructions):
            if isinstance(instruction, executor._Event):
                if instruction.do is executor._wait:
                    found.setdefault(f"{way[instruction.chunk]} {instruction.chunk.kind}", []).append(index)
                else:
                    way[instruction.chunk] = WAYS.get(instruction.do, "none")
        return found

    def outcome_without(self, index: int, *, forced: bool) -> tuple[list[str], BaseException | None]:
        """How a step without that wait differs, or the error it raised; `forced`: the state goes on as if it were
        there."""
        target = self.backward
        instructions: list[Any] = list(target.instructions)
        chunk = instructions[index].chunk
        instructions[index : index + 1] = [executor._Event(force_state, chunk)] if forced else []
        broken = dataclasses.replace(target, instructions=tuple(instructions))
        run = executor.Executable.__call__

        def swapped(executable: executor.Executable, *args: Any) -> list[Any]:
            return run(broken if executable is target else executable, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executor.Executable, "__call__", swapped)
            try:
                return differences(self.step(), self.expected), None
            except ChunkStateError as error:
                return [], error.with_traceback(None)


@pytest.fixture(scope="module")
def late() -> Iterator[Subject]:
    subject = Subject()
    yield subject
    assert not differences(subject.step(), subject.expected)  # the broken steps left nothing behind


def test_every_kind_of_wait_is_there(late: Subject) -> None:
    assert set(late.waits()) == set(KINDS)
    assert not differences(late.step(), late.expected)


@pytest.mark.parametrize("kind", KINDS)
def test_every_wait_matters(late: Subject, kind: str) -> None:
    for index in late.waits()[kind] if kind != "in grad" else ():  # whose slot has nothing to read from home
        found, error = late.outcome_without(index, forced=True)
        assert error is None
        assert found, f"nothing differs without {late.backward.instructions[index]}"
    _, error = late.outcome_without(late.waits()[kind][0], forced=False)
    assert isinstance(error, ChunkStateError)
