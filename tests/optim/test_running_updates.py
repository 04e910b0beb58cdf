"""`overlap`: the bits of an update inside `step()`, whatever is late; without a wait, others; doors that wait."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from harness import array, differences
from optim_models import through_a_file
from overlap_cases import Late, Subject, case, expected, results, subject
from torch import Tensor, nn

import chunkc
from chunkc.kernels.formats import GradScale
from chunkc.optim import elementwise
from chunkc.optim.elementwise import ElementwiseRule, clipped, update_on_cpu
from chunkc.optim.rule import Extent, Spans

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


# ---------------------------------------------------------------- copies of the model

# A module is copied and saved past every optimizer, tensor by tensor, from home; nothing there could make it wait. For
# `state_dict` alone modules have hooks.


SHORT_S, LONG_S = 0.1, 20.0
WEIGHT = "layers.0.weight"


class Halves:
    """Updates at home in two halves, between which they stand still until they are told to go on."""

    def __init__(self) -> None:
        self.half_done, self.going_on = threading.Event(), threading.Event()

    def __call__(
        self, rule: ElementwiseRule, flat: dict[str, Tensor], spans: Spans, scale: GradScale, extent: Extent
    ) -> None:
        numel = flat["param"].numel()
        half = numel // 2
        update_on_cpu(rule, part(flat, 0, half), clipped(spans, 0, half), scale, extent)
        self.half_done.set()
        assert self.going_on.wait(LONG_S), "nobody said so"
        later = Extent(extent.chunk, extent.first_element + half)
        update_on_cpu(rule, part(flat, half, numel), clipped(spans, half, numel), scale, later)


def part(flat: dict[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    return {kind: tensor[begin:end] for kind, tensor in flat.items()}


def deepcopy(model: nn.Module) -> Tensor:
    return copy.deepcopy(model).get_parameter(WEIGHT)


def save_model(model: nn.Module) -> Tensor:
    return through_a_file(model).get_parameter(WEIGHT)


def copied(
    made: Subject,
    ways: list[Callable[[nn.Module], Tensor]],
    patch: pytest.MonkeyPatch,
    wait: Callable[[nn.Module], object] | None,
    *,
    stands: bool = False,
) -> Any:
    """The weight before a step, in copies made while its update goes on, after `wait`, and after it.

    `stands`: the update stands still until the copies are made.
    """
    made.train(range(1), reading=False)
    made.optimizer.synchronize()
    before = array(made.model.get_parameter(WEIGHT)).ravel()
    halves = Halves()
    patch.setattr(elementwise, "update_on_cpu", halves)
    made.backward(1)
    made.optimizer.step()
    assert halves.half_done.wait(LONG_S)
    if not stands:
        threading.Timer(SHORT_S, halves.going_on.set).start()
    if wait is not None:
        wait(made.model)
    found = [array(way(made.model)).ravel() for way in ways]
    halves.going_on.set()
    chunkc.synchronize(made.model)
    return before, found, array(made.model.get_parameter(WEIGHT)).ravel()


@pytest.mark.second_tier
@pytest.mark.parametrize("waits", [True, False], ids=["synchronized", "not synchronized"])
def test_a_copy_of_the_model_waits_for_synchronize_only(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = chunkc.synchronize if waits else None
    before, found, after = copied(subject("forward"), [deepcopy, save_model], monkeypatch, wait, stands=not waits)
    half = after.size // 2
    assert (before[:half] != after[:half]).any()
    assert (before[half:] != after[half:]).any()
    for values in found:
        assert np.array_equal(values, after if waits else np.concatenate([after[:half], before[half:]]))


@pytest.mark.parametrize("of", ["model", "compiled model", "module"])
def test_a_state_dict_waits_by_itself(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = subject("forward")
    whose = {"model": made.model, "compiled model": made.compiled, "module": made.model.get_submodule("layers.0")}[of]
    prefix = {"model": "layers.0.", "compiled model": "_orig_mod.layers.0.", "module": ""}[of]
    ways = [lambda _: through_a_file(whose.state_dict())[f"{prefix}weight"]]
    before, (found,), after = copied(made, ways, monkeypatch, None)
    assert (before != after).any()
    assert np.array_equal(found, after)
