"""`overlap`: the bits of an update inside `step()`, whatever is late; without a wait, others; doors that wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import differences
from overlap_cases import Late, Subject, case, expected, results, subject

import chunkc

pytestmark = pytest.mark.timeout(120)

MODES = ("forward", "backward", "both")
SLOW_S = 0.03


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 40), marks=pytest.mark.slow)], ids=["few", "many"])
def test_late_copies_and_updates_change_no_bit(mode: str, seeds: range) -> None:
    for seed in seeds:
        found = results(Subject(mode, Late(seed, 0.004), Late(seed + 100, 0.02)), mode)
        assert not differences(found, expected(mode)), seed


@pytest.mark.quick(1, second=0)
@pytest.mark.parametrize("mode", MODES)
def test_half_precision_changes_no_bit(mode: str) -> None:
    found = results(Subject(mode, Late(0, 0.004), Late(1, 0.02), case(torch.bfloat16)), mode)
    assert not differences(found, expected(mode, torch.bfloat16))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["lamb", "8 bits, rounded at random"])
def test_other_rules_change_no_bit(name: str) -> None:
    def train(overlap: str) -> list[Any]:
        made = Subject(overlap, Late(0, 0.004), Late(1, 0.02), case(torch.bfloat16))
        options: dict[str, Any] = {"update_on": "cpu", "overlap": overlap}
        if name == "lamb":
            made.optimizer = chunkc.optim.LAMB(made.model.parameters(), lr=1e-2, **options)
        else:
            options |= {"moments_dtype": "int8", "stochastic_rounding": True}
            made.optimizer = chunkc.optim.AdamW(made.model.parameters(), lr=1e-2, **options)
        return [*made.train(range(3), reading=False), *made.state()]

    assert not differences(train("both"), train("none"))


def test_it_does_overlap() -> None:
    made = Subject("both", Late(), Late(fixed_s=0.05))
    made.train(range(1), reading=False)
    assert made.num_under_way == 4, "step() waits"
    made.backward(1)
    assert made.num_under_way == 4, "nothing began in the backward"
    made.optimizer.step()
    made.optimizer.synchronize()
    assert made.num_under_way == 0


def test_the_next_forward_s_first_chunks_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made, order = subject("forward"), []
    begin = made.store.updates.begin
    made.backward(0)
    made.store.updates._needed = dict.fromkeys([2, 0, 3, 1])

    def noted(group: int, *args: Any, **options: Any) -> None:
        order.append(group)
        begin(group, *args, **options)

    monkeypatch.setattr(made.store.updates, "begin", noted)
    made.optimizer.step()
    assert order == [2, 0, 3, 1]
    made.optimizer.synchronize()


# ---------------------------------------------------------------- each wait, left out


def without_fetch_after_update(patch: pytest.MonkeyPatch, made: Subject) -> None:
    patch.setattr(made.store.updates, "before", lambda group: ())


def without_arrival(patch: pytest.MonkeyPatch, made: Subject) -> None:
    patch.setattr(made.store.slots, "home_marks", lambda group: [*made.store.tier.mark()])


def without_the_step_s_wait(patch: pytest.MonkeyPatch, made: Subject) -> None:
    patch.setattr(made.optimizer.scheduler.in_session(made.session), "wait_after_step", lambda tasks: None)


@pytest.mark.parametrize(
    ("mode", "copies_s", "updates_s", "leave_out"),
    [
        ("forward", 0.0, SLOW_S, without_fetch_after_update),
        ("backward", SLOW_S, 0.0, without_arrival),
        ("backward", 0.0, SLOW_S, without_the_step_s_wait),
    ],
)
def test_every_wait_matters(mode: str, copies_s: float, updates_s: float, leave_out: Any) -> None:
    for broken in (False, True):
        made = Subject(mode, Late(fixed_s=copies_s), Late(fixed_s=updates_s))
        with pytest.MonkeyPatch.context() as patch:
            if broken:
                leave_out(patch, made)
            found = made.train(range(4), reading=mode == "backward")
            made.store.updates.finish()
        wanted = expected(mode)[: len(found)]
        assert bool(differences(found, wanted)) == broken


# ---------------------------------------------------------------- doors that wait


@contextmanager
def under_way(made: Subject) -> Iterator[None]:
    """Updates have been begun by a step, and are slow."""
    made.backward(0)
    made.optimizer.step()
    assert made.num_under_way
    yield
    made.optimizer.synchronize()
    made.optimizer.zero_grad()


def late_subject() -> Subject:
    return Subject("forward", Late(), Late(fixed_s=SLOW_S))


def test_what_compiled_code_does_not_train_is_updated_inside_the_step() -> None:
    made = late_subject()
    with under_way(made):
        made.optimizer.synchronize()
        made.session.trained -= {"layers.1.weight"}
        made.backward(1)
        made.optimizer.step()
        names = [{s.spec.name for s in group.slices} for group in made.store.layout.groups]
        ready = [not made.store.updates.before(group) for group in range(4)]
        index = next(i for i, group in enumerate(names) if "layers.1.weight" in group)
        assert ready[index]
        assert not all(ready)


def test_a_failed_update_is_named_at_the_next_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = subject("forward")
    made.train(range(1), reading=False)
    made.optimizer.synchronize()
    made.backward(1)
    with monkeypatch.context() as patch:
        patch.setattr("chunkc.optim.elementwise.chunk_update", lambda *args, **options: 1 / 0)
        patch.setattr("chunkc.optim.optimizer.update_in_place", lambda *args: None)
        made.optimizer.step()
        with pytest.raises(chunkc.StreamError, match=r"chunk param:0 \(layers.0.weight.*division by zero"):
            made.backward(2)
    with pytest.raises(chunkc.StreamError, match=r"layers.*division by zero"):
        made.optimizer.synchronize()
    made.optimizer.zero_grad()
    made.train(range(3, 4), reading=False)
