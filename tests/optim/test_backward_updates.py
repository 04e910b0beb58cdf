"""`overlap="backward"`: what cannot be done once updates have begun raises; what the user says first is obeyed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import slot_cases
import torch
from harness import differences
from overlap_cases import Subject, subject
from torch import nn

import chunkc

pytestmark = pytest.mark.timeout(120)


Make = Callable[[str], Any]
MAKES: dict[str, Make] = {
    "at home": subject,
    "in slots": slot_cases.Subject,
    "where it stays": partial(slot_cases.Subject, spare_nbytes=slot_cases.WITHOUT_GRADIENTS),
}
EVERYWHERE = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def num_begun(made: Any) -> int:
    """Updates that the backward has begun."""
    return made.num_under_way if isinstance(made, Subject) else len(made.used)


def trained_once(make: Make = subject) -> Any:
    made = make("backward")
    made.step(0)
    return made


def weight_of(made: Any) -> Any:
    return made.model.get_parameter("layers.2.weight")


def clip(made: Any) -> None:
    torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1e-3)


def replace_a_gradient(made: Any) -> None:
    weight_of(made).grad = weight_of(made).grad.clone()


def drop_a_gradient(made: Any) -> None:
    weight_of(made).grad = None


def change_a_parameter(made: Any) -> None:
    with torch.no_grad():
        weight_of(made).clamp_(-0.1, 0.1)


def replace_a_parameter(made: Any) -> None:
    weight_of(made).data = weight_of(made).data.clone()


def change_the_rate(made: Any) -> None:
    made.optimizer.param_groups[0]["lr"] = 0.5


REFUSED = {
    change_the_rate: r"hyper-parameters of layers.*after its update had begun.*change them after step",
    change_a_parameter: r"layers.*changed after its update had begun.*overlap=.forward",
    drop_a_gradient: r"layers.*changed after its update had begun.*overlap=.forward",
    replace_a_parameter: r"layers.*(changed|replaced) after its update had begun.*overlap=.forward",
}
OF_GRADIENTS = {
    clip: r"layers.*changed after its update had begun.*overlap=.forward",
    replace_a_gradient: r"layers.*changed after its update had begun.*overlap=.forward",
}
"""Where gradients are at home; elsewhere they are gone."""


@pytest.mark.quick(6)
@pytest.mark.parametrize(("place", "change"), [*product(MAKES, REFUSED), *product(["at home"], OF_GRADIENTS)])
def test_changes_after_the_update_began_are_refused(place: str, change: Any) -> None:
    made = trained_once(MAKES[place])
    made.backward(1)
    assert num_begun(made)
    change(made)
    with pytest.raises((chunkc.UnsupportedError, chunkc.OptionsError), match=(REFUSED | OF_GRADIENTS)[change]):
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


# ---------------------------------------------------------------- the bits of updates in the step


def accumulated(made: Any) -> None:
    """Where the user says so; residents go home for it."""
    for step in range(3):
        with made.optimizer.accumulating():
            made.backward(2 * step)
            made.backward(2 * step + 1)
            assert made.optimizer.overlap.mode == "both" or num_begun(made) == 0
        made.backward(2 * step + 10)
        if not isinstance(made, Subject):
            assert made.used == (made.moving if made.optimizer.overlap.mode == "backward" else set())
        made.optimizer.step()
        made.optimizer.zero_grad()


def hooked(made: Any) -> list[Any]:
    """A hook leaves its chunk to the step. What stays has room for the hook's gradient, and home for its chunk's alone.
    Lower bits of other contents are left out before they are fetched."""
    made.model.get_parameter("layers.1.weight").register_hook(lambda grad: grad * 2)
    found = [made.step(batch) for batch in range(2)]
    change_a_parameter(made)
    found.append(made.step(2))
    made.backward(3)
    is_early = made.optimizer.overlap.mode == "backward"
    assert num_begun(made) == (3 if is_early else 0)
    if is_early and not isinstance(made, Subject) and not made.store.resident:
        assert slot_cases.without_room(made) == made.moving - {made.store.views.group_index("layers.1.weight")}
    made.optimizer.step()
    return found


def refused_by_the_step(made: Any) -> None:
    """Arguments that are wrong."""
    for step in range(3):
        (group,) = made.optimizer.param_groups
        group["lr"] = -1.0 if step == 1 else 1e-2
        made.backward(step)
        if step == 1:
            with pytest.raises(chunkc.OptionsError, match="lr"):
                made.optimizer.step()
        group["lr"] = 1e-2
        made.optimizer.step()
        made.optimizer.zero_grad()


def momentum_is_switched_on(made: Any) -> None:
    """Begins with the step."""
    for step in range(5):
        made.optimizer.param_groups[0]["momentum"] = 0.9 if step > 1 else 0.0
        made.step(step)


def scheduled(made: Any) -> None:
    """A scheduler steps after the optimizer."""
    scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1, 0.5)
    for step in range(4):
        made.train(range(step, step + 1), reading=False)
        scheduler.step()


def a_new_group(made: Any) -> None:
    """What has begun is not updated again after it."""
    for step in range(3):
        made.backward(step)
        if step == 1:
            made.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        made.optimizer.step()
        made.optimizer.zero_grad()


def added_to_gradients_that_are_there(made: Any) -> None:
    made.step(0)
    for parameter in made.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    made.backward(1)
    assert not made.used & made.store.resident
    made.optimizer.step()


def by_sgd(overlap: str, update_on: str) -> slot_cases.Subject:
    arguments = {"lr": 1e-2, "update_on": update_on}
    return slot_cases.Subject(overlap, 1 << 13, optimizer=chunkc.optim.SGD, arguments=arguments)


MAKES_OF_SCRIPTS: dict[str, Make] = MAKES | {
    "in slots, with lower bits": partial(slot_cases.Subject, dtype=torch.bfloat16),
    "by SGD": partial(by_sgd, update_on="device"),
    "by SGD at home": partial(by_sgd, update_on="cpu"),
}
SCRIPTS: list[Any] = [
    *((accumulated, place, "backward") for place in MAKES),
    (accumulated, "at home", "both"),
    *((hooked, place, "backward") for place in (*MAKES, "in slots, with lower bits")),
    *((refused_by_the_step, place, "backward") for place in ("at home", "in slots")),
    *((momentum_is_switched_on, place, "backward") for place in ("by SGD", "by SGD at home")),
    (scheduled, "at home", "both"),
    (a_new_group, "at home", "backward"),
    pytest.param(a_new_group, "in slots", "backward", marks=pytest.mark.second_tier),
    (added_to_gradients_that_are_there, "where it stays", "backward"),
]


@pytest.mark.parametrize(("script", "place", "overlap"), SCRIPTS)
def test_bits_are_those_of_updates_in_the_step(script: Callable[[Any], Any], place: str, overlap: str) -> None:
    def trained(overlap: str) -> list[Any]:
        made = MAKES_OF_SCRIPTS[place](overlap)
        return [*(script(made) or ()), *made.state()]

    assert not differences(trained(overlap), trained("none"))


# ---------------------------------------------------------------- forgotten


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
@EVERYWHERE
def test_what_has_begun_is_not_updated_again_once_it_is_forgotten(make: Make, act: Callable[[Any], None]) -> None:
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
