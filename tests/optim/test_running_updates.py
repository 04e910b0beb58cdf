"""`overlap`: the bits of an update inside `step()`, whatever is late; without a wait, others; what waits by itself."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from harness import array, differences
from overlap_cases import Late, Subject, expected, results, subject

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


# ---------------------------------------------------------------- copies of the model

# A module is copied and saved past every optimizer, tensor by tensor, from home; nothing there could make it wait. For
# `state_dict` alone modules have hooks. The optimizer's own doors are in `faults/test_missing_optimizer_waits`.


@pytest.mark.parametrize("of", ["model", "compiled model", "module"])
def test_a_state_dict_waits_by_itself(of: str) -> None:
    opened = threading.Event()
    opened.set()
    made = Subject("forward", Late(), lambda: 0.0 if opened.wait(20) else 1 / 0)
    made.step(0)
    made.optimizer.synchronize()
    whose, prefix = {
        "model": (made.model, "layers.0."),
        "compiled model": (made.compiled, "_orig_mod.layers.0."),
        "module": (made.model.get_submodule("layers.0"), ""),
    }[of]
    opened.clear()
    made.backward(1)
    made.optimizer.step()
    before = array(made.weight_of(0))
    threading.Timer(0.1, opened.set).start()
    found = array(whose.state_dict()[f"{prefix}weight"])
    assert opened.is_set()
    made.optimizer.synchronize()
    assert np.array_equal(found, array(made.weight_of(0)))
    assert (before != found).any()
