"""`overlap="backward"`: what cannot be done once updates have begun raises; what the user says first is obeyed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import slot_cases
import torch
from harness import differences
from overlap_cases import Subject, subject
from torch import nn

import chunkc

pytestmark = pytest.mark.timeout(120)


def trained_once(overlap: str = "backward") -> Subject:
    made = subject(overlap)
    made.train(range(1), reading=False)
    return made


def clip(made: Subject) -> None:
    torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1e-3)


def replace_a_gradient(made: Subject) -> None:
    made.weight_of(2).grad = made.gradient_of(2).clone()


def drop_a_gradient(made: Subject) -> None:
    made.weight_of(2).grad = None


def change_a_parameter(made: Subject) -> None:
    with torch.no_grad():
        made.weight_of(2).clamp_(-0.1, 0.1)


def replace_a_parameter(made: Subject) -> None:
    made.weight_of(2).data = made.weight_of(2).data.clone()


CHANGES = [clip, replace_a_gradient, drop_a_gradient, change_a_parameter, replace_a_parameter]


@pytest.mark.quick(2)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_the_update_began_are_refused(change: Any) -> None:
    made = trained_once()
    made.backward(1)
    change(made)
    with pytest.raises(
        chunkc.UnsupportedError, match=r"layers.*(changed|replaced) after its update had begun.*overlap=.forward"
    ):
        made.optimizer.step()


def train_scaled(overlap: str, *, unscale: bool) -> list[Any]:
    made, scaler = subject(overlap), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        scaler.scale(made.compiled(**made.case.batch(step))).backward()
        if unscale:
            scaler.unscale_(made.optimizer)
        scaler.step(made.optimizer)
        scaler.update()
        made.optimizer.zero_grad()
    return made.state()


@pytest.mark.second_tier
@pytest.mark.parametrize("unscale", [False, True])
def test_a_loss_scale_waits_for_all_gradients(unscale: bool) -> None:
    assert not differences(train_scaled("forward", unscale=unscale), train_scaled("none", unscale=unscale))
    with pytest.raises(chunkc.UnsupportedError, match=r"a GradScaler must see all gradients.*overlap=.forward"):
        train_scaled("backward", unscale=unscale)


def test_a_learning_rate_that_changes_between_backward_and_step_is_refused() -> None:
    made = trained_once()
    made.backward(1)
    made.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(chunkc.OptionsError, match=r"hyper-parameters of layers.*change them after step"):
        made.optimizer.step()


@pytest.mark.parametrize("make", [subject, slot_cases.Subject])
def test_arguments_that_are_wrong_are_refused_by_the_step(make: Callable[[str], Any]) -> None:
    def train(overlap: str) -> list[Any]:
        made = make(overlap)
        for step in range(3):
            (group,) = made.optimizer.param_groups
            if step == 1:
                group["lr"] = -1.0
            made.backward(step)
            if step == 1:
                with pytest.raises(chunkc.OptionsError, match="lr"):
                    made.optimizer.step()
                group["lr"] = 1e-2
            made.optimizer.step()
            made.optimizer.zero_grad()
        return made.state()

    assert not differences(train("backward"), train("none"))


@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_a_momentum_that_is_switched_on_begins_with_the_step(update_on: str) -> None:
    def train(overlap: str) -> list[Any]:
        arguments = {"lr": 1e-2, "update_on": update_on}
        made = slot_cases.Subject(overlap, 1 << 13, optimizer=chunkc.optim.SGD, arguments=arguments)
        for step in range(5):
            made.optimizer.param_groups[0]["momentum"] = 0.9 if step > 1 else 0.0
            made.step(step)
        return made.state()

    assert not differences(train("backward"), train("none"))


def test_a_scheduler_steps_after_the_optimizer() -> None:
    def train(overlap: str) -> list[Any]:
        made = subject(overlap)
        scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, 0.5)
        for step in range(4):
            made.train(range(step, step + 1), reading=False)
            scheduler.step()
        return made.state()

    assert not differences(train("both"), train("none"))


def test_a_second_backward_before_the_step_is_refused() -> None:
    made = trained_once()
    loss = made.compiled(**made.case.batch(1))
    other = made.compiled(**made.case.batch(2))
    other.backward()
    assert made.num_under_way == 0, "a forward is still without its backward"
    loss.backward()
    assert made.num_under_way == 4
    with pytest.raises(chunkc.UnsupportedError, match=r"call optimizer.step\(\) after each backward"):
        made.compiled(**made.case.batch(3))
    made.optimizer.step()
    made.compiled(**made.case.batch(3))


def test_gradients_accumulate_where_the_user_says_so() -> None:
    def train(overlap: str) -> list[Any]:
        made = subject(overlap)
        for step in range(3):
            with made.optimizer.accumulating():
                made.backward(2 * step)
                made.backward(2 * step + 1)
                assert overlap == "both" or made.num_under_way == 0
            made.backward(2 * step + 10)
            made.optimizer.step()
            made.optimizer.zero_grad()
        return made.state()

    for mode in ("backward", "both"):
        assert not differences(train(mode), train("none"))


def test_parameters_with_hooks_are_updated_in_the_step() -> None:
    def train(overlap: str) -> list[Any]:
        made = subject(overlap)
        made.weight_of(1).register_hook(lambda grad: grad * 2)
        found = made.train(range(2), reading=False)
        made.backward(2)
        assert made.num_under_way == (3 if overlap == "backward" else 0)
        made.optimizer.step()
        return [*found, *made.state()]

    assert not differences(train("backward"), train("none"))


@pytest.mark.quick(1)
@pytest.mark.parametrize("make", [subject, slot_cases.Subject])
def test_what_has_begun_is_not_updated_again_after_a_new_group(make: Callable[[str], Any]) -> None:
    def train(overlap: str) -> list[Any]:
        made = make(overlap)
        for step in range(3):
            made.backward(step)
            if step == 1:
                made.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
            made.optimizer.step()
            made.optimizer.zero_grad()
        return made.state()

    assert not differences(train("backward"), train("none"))


def load_states(made: Any) -> None:
    made.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))


def step_in_vain(made: Any) -> None:
    (group,) = made.optimizer.param_groups
    group["lr"] *= 2
    with pytest.raises(chunkc.OptionsError, match="hyper-parameters of layers"):
        made.optimizer.step()
    group["lr"] /= 2


@pytest.mark.quick(2)
@pytest.mark.parametrize("act", [load_states, step_in_vain])
@pytest.mark.parametrize(
    "make", [subject, slot_cases.Subject, partial(slot_cases.Subject, spare_nbytes=slot_cases.WITHOUT_GRADIENTS)]
)
def test_what_has_begun_is_not_updated_again_once_it_is_forgotten(
    make: Callable[[str], Any], act: Callable[[Any], None]
) -> None:
    """PyTorch would update what the backward has updated already: until it is loaded anew, that is refused."""

    def train(made: Any, *steps: int) -> None:
        for step in steps:
            made.backward(step)
            made.optimizer.step()
            made.optimizer.zero_grad()

    train(made := make("backward"), 0)
    saved = copy.deepcopy((made.model.state_dict(), made.optimizer.state_dict()))
    made.backward(1)
    act(made)
    before = made.state()
    for again in (made.optimizer.step, lambda: made.backward(2)):
        with pytest.raises(chunkc.UnsupportedError, match=r"gradient of layers.*was consumed.*before any states"):
            again()
    assert not differences(made.state(), before)
    made.model.load_state_dict(saved[0])
    made.optimizer.load_state_dict(saved[1])
    made.optimizer.zero_grad()
    train(made, 1, 2)
    train(whole := make("none"), 0, 1, 2)
    assert not differences(made.state(), whole.state())


def test_a_new_group_and_a_loaded_state_begin_anew() -> None:
    made = trained_once()
    made.backward(1)
    assert made.num_under_way == 4
    made.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    made.optimizer.zero_grad()
    made.backward(2)
    assert made.num_under_way == 0
    made.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    made.optimizer.step()
