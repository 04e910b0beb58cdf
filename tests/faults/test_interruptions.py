"""NaN, exceptions and Ctrl-C in the middle of a step do what they do in PyTorch; nothing hangs, and training goes on.

Updates under way end by themselves. What was interrupted may be done again, with the same bits as if nothing had
happened; or a clear error says what comes first.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness import HUGE, adamw, array, compile_case, differences, weights
from overlap_cases import Late, Subject, case
from scripts import CASE, compile_small, train_steps
from store_cases import ctrl_c_in_a_wait

import chunkc
from chunkc.ir.layout import ChunkGroup
from chunkc.optim.step import PreparedUpdate
from chunkc.optim.update_mode import UpdateMode


def _interrupt_after(num_calls: int, submit: Callable) -> Callable:
    """`WorkerStream.submit`, interrupted once at the given call of the main thread: Python interrupts no other."""
    remaining = num_calls

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal remaining
        if threading.current_thread() is threading.main_thread():
            remaining -= 1
            if remaining == 0:
                raise KeyboardInterrupt
        return submit(*args, **kwargs)

    return interrupted


@pytest.mark.second_tier
@pytest.mark.parametrize(("home", "num_calls"), [("cpu", 4), ("disk", 1), ("disk", 6)])
def test_control_c_while_copying(home: str, num_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as a copy is submitted, in the middle of a step: nothing hangs and the next step works."""
    from chunkc.runtime.device.streams import WorkerStream

    model, compiled = compile_small(home)
    optimizer = adamw(model.parameters())
    losses = train_steps(compiled, optimizer, range(1))
    before = weights(model)
    with monkeypatch.context() as patch:
        patch.setattr(WorkerStream, "submit", _interrupt_after(num_calls, WorkerStream.submit))
        with pytest.raises(KeyboardInterrupt):
            compiled(**CASE.batch(9)).backward()
    assert not differences(weights(model), before)
    optimizer.zero_grad()
    losses += train_steps(compiled, optimizer, range(1, 3))
    model, compiled = compile_case(CASE, memory_budget=HUGE, whole_graph="never")
    expected = train_steps(compiled, adamw(model.parameters()), range(3))
    assert not differences(losses, expected)
    assert not any(math.isnan(float(loss)) for loss in losses)


# ---------------------------------------------------------------- waits for updates at home

pytestmark = pytest.mark.timeout(120)

LATE_S = 0.1


class InterruptedSteps(Subject):
    """A model with one step behind it; from then on copies and updates are late when they are told to be."""

    def __init__(self, overlap: str, dtype: torch.dtype = torch.float32) -> None:
        self.copies, self.updates = Late(), Late()
        super().__init__(overlap, self.copies, self.updates, of=case(dtype))
        self.train(range(1), reading=False)
        self.optimizer.synchronize()

    def ends(self) -> list[Any]:
        """What is there after two more steps, in which nothing is late."""
        self.copies.fixed_s = self.updates.fixed_s = 0.0
        self.step(5)
        self.step(6)
        return self.state()


@functools.cache
def expected(num_updates: int = 1, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Nothing overlaps and nobody interrupts; the first step is made so many times on its gradient."""
    made = InterruptedSteps("none", dtype)
    made.backward(1)
    for _ in range(num_updates):
        made.optimizer.step()
    made.optimizer.zero_grad()
    return made.ends()


WAITS: dict[str, Callable[[InterruptedSteps], Any]] = {
    "forward": lambda made: made.compiled(**made.case.batch(5)),
    "without gradients": torch.no_grad()(lambda made: made.compiled(**made.case.batch(5))),
    "synchronize": lambda made: made.optimizer.synchronize(),
    "chunkc.synchronize": lambda made: chunkc.synchronize(made.model),
    "state_dict": lambda made: made.optimizer.state_dict(),
}


@pytest.mark.quick(0, second=5)
@pytest.mark.parametrize("overlap", ["forward", "both"])
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_behind_a_step_is_interrupted(wait: str, overlap: str) -> None:
    made = InterruptedSteps(overlap)
    if wait == "without gradients":
        WAITS[wait](made)  # its code is compiled now: that may take longer than all updates
    made.updates.fixed_s = LATE_S
    made.step(1)
    with pytest.raises(KeyboardInterrupt), ctrl_c_in_a_wait() as where:
        WAITS[wait](made)
    assert where
    assert made.store.slots.present == frozenset()
    assert not differences(made.ends(), expected())


@pytest.mark.parametrize(
    ("overlap", "num_before", "wait", "dtype"),
    [
        ("backward", 0, "wait_after_step", torch.float32),
        ("none", 0, "wait_after_step", torch.bfloat16),
        ("forward", 1, "_prepare", torch.float32),
    ],
)
def test_a_wait_of_a_step_is_interrupted(overlap: str, num_before: int, wait: str, dtype: torch.dtype) -> None:
    """At its end, when all of it has begun, and masters keep their lower bits; or for the step before, when nothing of
    it has: then it is made again."""
    made = InterruptedSteps(overlap, dtype)
    made.updates.fixed_s = LATE_S
    made.backward(1)
    for _ in range(num_before):
        made.optimizer.step()
    with pytest.raises(KeyboardInterrupt), ctrl_c_in_a_wait() as where:
        made.optimizer.step()
    assert wait in where
    for _ in range(num_before):
        made.optimizer.step()
    made.optimizer.zero_grad()
    assert not differences(made.ends(), expected(1 + num_before, dtype))


def test_an_error_in_slots_leaves_no_update_at_home_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written to parameters once `step` has raised it."""

    def at_home(mode: UpdateMode, groups: Sequence[ChunkGroup], *_: Any, **__: Any) -> frozenset[int]:
        return frozenset(group.index for group in groups if group.index < 2)

    def fail(*_: Any) -> None:
        raise RuntimeError("in slots")

    monkeypatch.setattr(UpdateMode, "at_home", at_home)
    made = InterruptedSteps("none")
    made.updates.fixed_s = LATE_S
    made.backward(1)
    monkeypatch.setattr(PreparedUpdate, "run", fail)
    begun = []
    monkeypatch.setattr(
        made.store.updates, "begin", lambda *update, begin=made.store.updates.begin: begun.append(begin(*update))
    )
    with pytest.raises(RuntimeError, match="in slots"):
        made.optimizer.step()
    assert len(begun) == 2
    assert made.num_under_way == 0


def test_a_step_waits_for_its_own_updates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another optimizer's failed one is told where that optimizer's chunks are needed."""
    made = Subject("none", Late(), Late())
    of_first = [*made.model.layers[:2].parameters()]
    of_second = [*made.model.layers[2:].parameters()]
    first = chunkc.optim.AdamW(of_first, update_on="cpu", overlap="forward")
    second = chunkc.optim.AdamW(of_second, update_on="cpu", overlap="none")
    made.backward(1)
    with monkeypatch.context() as patch:
        patch.setattr("chunkc.optim.elementwise.chunk_update", lambda *_, **__: 1 / 0)
        first.step()
        for update in made.store.updates._pending.values():
            assert update.event is not None
            while not update.event.done():
                time.sleep(0.001)
    second.step()
    with pytest.raises(chunkc.StreamError, match="division by zero"):
        first.synchronize()


@pytest.mark.parametrize("overlap", ["backward", "both"])
def test_a_backward_is_interrupted_whose_updates_have_begun(overlap: str) -> None:
    """A forward is refused until a step has taken in what began; from then on all is as ever."""
    made = InterruptedSteps(overlap)
    loss = made.compiled(**made.case.batch(1))
    made.updates.fixed_s = made.copies.fixed_s = LATE_S
    with pytest.raises(KeyboardInterrupt), ctrl_c_in_a_wait(when=lambda: made.num_under_way > 0) as where:
        loss.backward()
    assert where
    assert 0 < made.num_under_way < 4
    del loss
    made.copies.fixed_s = 0.0
    with pytest.raises(chunkc.UnsupportedError, match=r"call optimizer.step\(\) after each backward"):
        made.compiled(**made.case.batch(5))
    made.optimizer.step()
    made.optimizer.zero_grad()
    before = [array(p) for p in made.model.parameters()] if overlap == "backward" else []
    found = made.ends()
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in found)
    assert not before or differences(found[: len(before)], before)
    assert made.num_under_way == 0


@pytest.mark.parametrize("begun", [False, True])
def test_a_backward_is_interrupted_as_an_update_begins(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right before or right behind the beginning: the group is updated once, in the backward or in the step."""
    made = InterruptedSteps("backward")
    begin, updates = made.store.updates.begin, made.store.updates
    weight = made.weight_of(3)

    def interrupted(group: int, update: Any) -> None:
        if begun:
            begin(group, update)
        raise KeyboardInterrupt

    loss = made.compiled(**made.case.batch(1))
    before = int(made.optimizer.state[weight]["step"])
    monkeypatch.setattr(updates, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    monkeypatch.undo()
    assert made.num_under_way == begun
    with pytest.raises(chunkc.UnsupportedError, match=r"call optimizer.step\(\) after each backward"):
        made.compiled(**made.case.batch(5))
    old = array(weight)
    made.optimizer.step()
    assert int(made.optimizer.state[weight]["step"]) == before + 1
    assert begun or differences(array(weight), old)
    made.optimizer.zero_grad()
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in made.ends())
