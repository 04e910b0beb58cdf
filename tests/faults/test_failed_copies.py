"""Copies that fail in the middle of a step, and NaN: torn is nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fault_cases import CASE, expected_losses, small_budget, train_steps, undisturbed
from harness import adamw, compile_case, differences, gradients, weights
from store_cases import Builder, make_store

import chunkc
from chunkc.runtime.device.streams import JobMark
from chunkc.runtime.execution.executor import lower
from chunkc.runtime.execution.run import Measurement, Run
from chunkc.runtime.execution.saved import SavedRoom, SavedValues
from chunkc.runtime.storage.homes import MemoryHome

pytestmark = [
    pytest.mark.timeout(90),  # a hang is a failure
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),  # they die on purpose
]


def once(at: int, real: Callable[..., Any], fault: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, but `fault` at the given call, counted from 1; afterwards, all is well again."""
    num_calls = 0

    def call(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return (fault if num_calls == at else real)(*args)

    return call


def _die(event: JobMark, *args: Any) -> None:
    """The worker thread ends in the middle of a copy, without a word: its job is never finished."""
    raise SystemExit


def _input_output_error(*args: Any) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def break_copy(patch: pytest.MonkeyPatch, fault: str, at: int) -> None:
    """Let one copy of those to come fail."""
    if fault == "thread":
        patch.setattr(JobMark, "_run", once(at, JobMark._run, _die))
    else:
        patch.setattr(os, fault, once(at, getattr(os, fault), _input_output_error))


FAULTS = [
    (phase, fault, at)
    for phase, fault, last in (
        ("optimizer", "pwritev", 12),
        ("optimizer", "thread", 20),
        ("optimizer", "preadv", 16),
        ("forward", "thread", 4),
        ("forward", "preadv", 4),
        ("backward", "thread", 5),
        ("backward", "preadv", 2),  # some chunks are in slots already
        ("backward", "pwritev", 4),
    )
    for at in (last, 1)
]
"""The `at`-th copy of a phase goes wrong: (nearly) its last, or its first."""


@pytest.mark.quick(1)
@pytest.mark.parametrize(("phase", "fault", "at"), FAULTS)
def test_a_copy_that_fails_in_the_middle_of_a_step(
    phase: str, fault: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compiled = compile_case(
        CASE, memory_budget=small_budget(), home=f"disk:{tmp_path}", whole_graph="never", debug=True
    )
    optimizer = adamw(model.parameters())
    losses = train_steps(compiled, optimizer, range(1))
    before = weights(model)

    def step(until: str) -> Iterator[str]:
        yield "forward"
        loss = compiled(**CASE.batch(1))
        yield "backward"
        loss.backward()
        yield "optimizer"
        optimizer.step()

    with monkeypatch.context() as patch:
        parts = step(phase)
        while next(parts) != phase:
            pass
        grads = gradients(model)
        break_copy(patch, fault, at)
        with pytest.raises(chunkc.StreamError if fault == "thread" else chunkc.HomeError) as caught:
            next(parts)
        if fault == "thread":
            assert "thread" in str(caught.value)
        else:
            assert caught.value.errno == errno.EIO
            assert str(tmp_path) in str(caught.value)
    after = weights(model)
    assert all(np.isfinite(value).all() for value in after.values())
    assert all(np.isfinite(gradient).all() for gradient in gradients(model).values())
    assert not list(tmp_path.iterdir())
    if phase == "optimizer":
        # Chunks updated before the fault stay updated; no tensor is anything in between.
        assert not differences(gradients(model), grads)
        _, updated = undisturbed(2)
        changed = {name for name in after if not differences(after[name], updated[name])}
        assert at == 1 or changed
        assert at > 12 or changed != set(after)
        for name in after.keys() - changed:
            assert not differences(after[name], before[name]), f"{name} is torn"
        del caught
        optimizer.zero_grad()
        assert all(np.isfinite(loss) for loss in train_steps(compiled, optimizer, range(1, 3)))
        return
    assert not differences(after, before)
    del caught
    optimizer.zero_grad()
    losses += train_steps(compiled, optimizer, range(1, 3))
    assert not differences(losses, expected_losses(3))


def test_a_batch_whose_loss_is_nan_can_be_left_out() -> None:
    """`if isfinite(loss)`, as many training loops do: as if the batch had never been."""
    model, compiled = compile_case(CASE, memory_budget=small_budget(), home="disk", whole_graph="never", debug=True)
    optimizer = adamw(model.parameters())
    losses = train_steps(compiled, optimizer, range(1))
    loss = compiled(x=torch.full((8, 64), float("nan")))
    loss.backward()
    assert torch.isnan(loss)
    assert all(np.isnan(gradient).all() for gradient in gradients(model).values())
    del loss
    optimizer.zero_grad()
    losses += train_steps(compiled, optimizer, range(1, 3))
    expected, expected_weights = undisturbed()
    assert not differences(losses, expected)
    assert not differences(weights(model), expected_weights)


class Copy:
    """A copy under way, which fails where there is a `problem`."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem, self.is_over = problem, False

    def wait(self) -> None:
        self.is_over = True
        if self.problem is not None:
            raise self.problem


def test_copies_of_saved_values_are_over_before_an_error_frees_what_they_read() -> None:
    copies = {"first": Copy(chunkc.StreamError("the disk is on fire")), "second": Copy()}
    saved = SavedValues(SavedRoom(MemoryHome()), under_way=dict(copies))
    build = Builder()
    build.call("fail", build.graph.placeholder("x"))
    build.graph.output(())

    def fail(values: list[Any]) -> Any:
        raise ZeroDivisionError("oops")

    store, _ = make_store("a")
    with pytest.raises(ZeroDivisionError, match="oops"):
        lower(build.graph, {"fail": fail})([torch.ones(1)], Run(store, Measurement(), saved=saved))
    assert all(copy.is_over for copy in copies.values())
    assert not saved.under_way


def test_a_step_with_nan_gradients_gives_nan_as_in_pytorch() -> None:
    """Nothing is caught, hidden or raised: what had a NaN gradient is NaN, in weights and states."""
    model, compiled = compile_case(CASE, memory_budget=small_budget(), home="disk", whole_graph="never")
    optimizer = adamw(model.parameters())
    compiled(x=torch.full((8, 64), float("nan"))).backward()
    optimizer.step()
    assert all(np.isnan(value).all() for value in weights(model).values())
    assert all(state["exp_avg"].isnan().all() for state in optimizer.state.values())
