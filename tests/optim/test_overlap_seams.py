"""`overlap` beside all else that an optimizer meets: failed steps, two optimizers, writes, other parameter groups."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import slot_cases
import torch
from harness import array, differences, home_of, segmented, take_step
from overlap_cases import Late, Subject, case, subject
from torch import nn

import chunkc
from chunkc.runtime.device.updates import HomeUpdate

pytestmark = pytest.mark.timeout(120)
BF16 = torch.bfloat16


def test_a_step_without_room_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What began in the backward is not updated a second time."""

    def train(overlap: str, *, failing: bool) -> list[Any]:
        made = subject(overlap)
        made.train(range(1), reading=False)
        made.backward(1)
        if failing:

            def no_room(*args: Any) -> None:
                raise chunkc.HomeError("no room")

            with monkeypatch.context() as patch:
                patch.setattr("chunkc.optim.step._prepare", no_room)
                with pytest.raises(chunkc.HomeError):
                    made.optimizer.step()
        made.optimizer.step()
        made.optimizer.zero_grad()
        made.train(range(2, 3), reading=False)
        return made.state()

    assert not differences(train("backward", failing=True), train("none", failing=False))


def test_updates_of_all_models_are_waited_for_though_some_failed() -> None:
    """Two sessions, one optimizer."""
    models = nn.ModuleList(chunkc.place(nn.Linear(64, 64, bias=False), chunk_size=16384) for _ in range(2))
    optimizer = chunkc.optim.AdamW(models.parameters(), update_on="cpu", overlap="forward")
    for parameter in models.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stores = [home_of(parameter)[0].store for parameter in models.parameters()]
    assert stores[0] is not stores[1]
    for wait in (optimizer.synchronize, lambda: chunkc.synchronize(models)):
        opened, ended = threading.Event(), list[int]()

        def late(number: int, opened: threading.Event = opened, ended: list[int] = ended) -> None:
            assert opened.wait(20)
            ended.append(number)

        for number, store in enumerate(stores):
            store.updates.begin(0, HomeUpdate(lambda: 1 / 0, f"model {number}"))
            store.updates.begin(1, HomeUpdate(functools.partial(late, number), "the rest"))
        timer = threading.Timer(0.1, opened.set)
        timer.start()
        with pytest.raises(chunkc.StreamError, match=r"the update of model . failed") as caught:
            wait()
        assert sorted(ended) == [0, 1]
        assert not any(store.updates._pending for store in stores)
        assert {"model 0", "model 1"} == set(re.findall("model .", f"{caught.value} {caught.value.__notes__}"))
        wait()


def test_a_report_waits_for_nothing_and_takes_no_failure_away() -> None:
    """While an update is under way, after one has failed, and after a call that raised."""
    made, opened = subject("forward"), threading.Event()
    made.train(range(1), reading=False)
    made.optimizer.synchronize()
    before = chunkc.report(made.compiled)
    made.store.updates.begin(0, HomeUpdate(lambda: 1 / 0, "it"))
    made.store.updates.begin(1, HomeUpdate(lambda: assert_opened(opened), "another"))
    assert chunkc.report(made.compiled) == before
    opened.set()
    with pytest.raises(chunkc.StreamError, match="the update of it failed"):
        made.compiled(**made.case.batch(1))
    after = chunkc.report(made.compiled)
    assert (after.moments, after.measured_peak_nbytes) == (before.moments, before.measured_peak_nbytes)
    with pytest.raises(chunkc.StreamError, match="the update of it failed"):
        made.optimizer.synchronize()
    made.optimizer.synchronize()


def assert_opened(opened: threading.Event) -> None:
    assert opened.wait(20)


def two_optimizers_of_one_model(overlap: str, dtype: torch.dtype) -> list[Any]:
    """Each has every other parameter: weights and biases of every layer are apart, and so are some chunks."""
    made = Subject(overlap, Late(0, 0.004), Late(1, 0.02), case(dtype))
    parameters = list(made.model.parameters())
    options: dict[str, Any] = {"lr": 1e-2, "update_on": "cpu", "overlap": overlap}
    pair = [chunkc.optim.AdamW(parameters[:4], **options), chunkc.optim.AdamW(parameters[4:], **options)]
    for step in range(4):
        made.backward(step)
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
    for optimizer in pair:
        optimizer.synchronize()
    return [array(t) for of in pair for p in of.param_groups[0]["params"] for t in (p, of.state[p]["exp_avg"])]


def written_after_the_step(overlap: str, dtype: torch.dtype) -> list[Any]:
    """Written between steps while updates were under way, and waited for: what is written is the master."""
    made = Subject(overlap, Late(0, 0.004), Late(1, 0.02), case(dtype))
    for step in range(4):
        made.train(range(step, step + 1), reading=False)
        chunkc.synchronize(made.model)
        with torch.no_grad():
            made.weight_of(step).clamp_(-0.05, 0.05)
    return made.state()


def two_models_that_share_a_budget(overlap: str, dtype: torch.dtype) -> list[Any]:
    """One session, one optimizer for each; the one steps every other time."""
    of = case(dtype)
    torch.manual_seed(0)
    models = [of.build(), of.build()]
    compiled = [segmented(model, 400 * 1024, activations="auto") for model in models]
    options: dict[str, Any] = {"lr": 1e-2, "update_on": "cpu", "overlap": overlap}
    optimizers = [chunkc.optim.AdamW(model.parameters(), **options) for model in models]
    for step in range(5):
        for index in range(2 if step % 2 == 0 else 1):
            take_step(compiled[index](**of.batch(step)), optimizers[index])
    for optimizer in optimizers:
        optimizer.synchronize()
    return [array(p) for model in models for p in model.parameters()]


SECOND, SLOW = pytest.mark.second_tier, pytest.mark.slow


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("overlap", ["forward", "backward", "both"])
@pytest.mark.parametrize(
    ("train", "dtype"),
    [
        pytest.param(two_optimizers_of_one_model, BF16, marks=SECOND),
        pytest.param(two_optimizers_of_one_model, torch.float32, marks=SLOW),
        pytest.param(written_after_the_step, BF16, marks=SECOND),
        pytest.param(two_models_that_share_a_budget, torch.float32, marks=SECOND),
    ],
)
def test_bits_are_those_without_overlap(train: Callable[..., list[Any]], dtype: torch.dtype, overlap: str) -> None:
    assert not differences(train(overlap, dtype), train("none", dtype))


PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "residents": (slot_cases.WITHOUT_GRADIENTS, {}),
    "in slots": (1 << 13, {}),
    "at home": (1 << 13, {"update_on": "cpu"}),
    "staged in slots": (1 << 13, {"undoable": True}),
    "staged at home": (1 << 13, {"undoable": True, "update_on": "cpu"}),
}


@pytest.mark.parametrize("place", PLACES)
def test_other_parameter_groups_count_from_the_next_backward(place: str) -> None:
    """As wrappers of optimizers put them there: another dictionary, with other values."""
    spare_nbytes, arguments = PLACES[place]

    def train(overlap: str, **only: Any) -> list[Any]:
        chosen = slot_cases.ADAMW | {"update_on": arguments.get("update_on", "device")} | only
        made = slot_cases.Subject(overlap, spare_nbytes, arguments=chosen)
        losses = [made.step(batch) for batch in range(2)]
        made.optimizer.param_groups[0] = {**made.optimizer.param_groups[0], "lr": 3e-3}
        losses += [made.step(batch) for batch in range(2, 4)]
        if place.startswith("staged"):  # between the backward and its step, too: what was staged is undone
            made.backward(4)
            made.optimizer.param_groups = [{**group, "lr": 2e-3} for group in made.optimizer.param_groups]
            made.optimizer.step()
        return [*losses, *made.state()]

    assert not differences(train("backward", **arguments), train("none"))


def test_a_parameter_that_was_taken_out_is_not_updated() -> None:
    def train(overlap: str, **only: Any) -> list[Any]:
        made = slot_cases.Subject(overlap, 1 << 13, arguments=slot_cases.ADAMW | only)
        made.step(0)
        made.backward(1)
        del made.optimizer.param_groups[0]["params"][0]
        made.optimizer.step()
        return [array(parameter) for parameter in made.model.parameters()]

    assert not differences(train("backward", undoable=True), train("none"))
