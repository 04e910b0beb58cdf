"""What users do between a backward and its step, where no version counter sees it and where one does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import dlpack


class Between:
    """A model and its optimizer at some step, and what the user has kept from before the first step.

    Attributes:
        weight: a parameter that moves.
    """

    def __init__(self, model: nn.Module, optimizer: Any, name: str) -> None:
        self.model, self.optimizer, self.weight = model, optimizer, model.get_parameter(name)
        self.kept: dict[str, Any] = {}

    @property
    def grad(self) -> torch.Tensor:
        assert self.weight.grad is not None
        return self.weight.grad

    @property
    def exp_avg(self) -> torch.Tensor:
        return self.optimizer.state[self.weight]["exp_avg"]


UserAct = Callable[[Between], object]


def data_of_a_gradient(now: Between) -> None:
    now.grad.data.clamp_(-1e-4, 1e-4)


def set_of_a_gradient(now: Between) -> None:
    now.grad.data.set_((now.grad * 0.5).untyped_storage())
    now.grad.set_(now.grad.detach() * 0.5)


def through_addresses(now: Between) -> None:
    """As libraries in C do. The device has the host's addresses for pinned memory."""
    if now.grad.is_cuda:
        torch.cuda.synchronize()
    ctypes.memset(now.grad.data_ptr(), 0, now.grad.nbytes // 2)


def parameter_in_place(now: Between) -> None:
    with torch.no_grad():
        now.weight.clamp_(-0.05, 0.05)


def clip_in_the_step(now: Between) -> None:
    now.optimizer.clip_grad_norm_(1e-3)


def another_rate(now: Between) -> None:
    now.optimizer.param_groups[0]["lr"] *= 0.5


def loaded_states(now: Between) -> None:
    saved = now.optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"] * 0.5
    now.optimizer.load_state_dict(saved)


def nothing_but_reading(now: Between) -> None:
    """Reads what training loops read: nothing has to be undone for it."""
    for parameter in now.model.parameters():
        assert torch.isfinite(parameter.grad.data).all()
        assert parameter.detach().norm() > 0
    now.model.state_dict()
    repr(now.weight)


def keeping(keep: Callable[[Between], Any], part: Callable[[Between, Any], torch.Tensor]) -> UserAct:
    """Write to a part of what was kept at the step before, and keep it from this one."""

    def act(now: Between) -> None:
        if "it" in now.kept:
            part(now, now.kept["it"]).mul_(0.5)
        now.kept["it"] = keep(now)

    return act


_NAMED: dict[str, UserAct] = {
    "data_of_a_parameter": lambda now: now.weight.data.mul_(0.5),
    "one_element": lambda now: now.grad.data.view(-1)[-1:].fill_(0.25),
    "other_data_for_a_gradient": lambda now: setattr(now.grad, "data", now.grad.detach() * 0.5),
    "other_data_for_a_parameter": lambda now: setattr(now.weight, "data", now.weight.detach() * 0.5),
    "through_dlpack": lambda now: dlpack.from_dlpack(dlpack.to_dlpack(now.grad)).mul_(0.5),
    "through_the_storage": lambda now: (
        torch.tensor([], dtype=now.grad.dtype, device=now.grad.device).set_(now.grad.untyped_storage()).mul_(0.5)
    ),
    "kept_parameter": keeping(lambda now: now.weight.data, lambda now, kept: kept),
    "kept_view_of_a_parameter": keeping(lambda now: now.weight.data.view(-1)[:7], lambda now, kept: kept),
    "lists_of_data": lambda now: torch._foreach_mul_(
        [p.grad.data for p in now.model.parameters() if p.grad is not None], 0.5
    ),
    "in_place": lambda now: now.grad.mul_(0.5),
    "clip_norm": lambda now: nn.utils.clip_grad_norm_(now.model.parameters(), 1e-3),
    "clip_values": lambda now: nn.utils.clip_grad_value_(now.model.parameters(), 1e-4),
    "dropped_gradients": lambda now: now.optimizer.zero_grad(),
    "zeroed_gradients": lambda now: now.optimizer.zero_grad(set_to_none=False),
    "dropped_gradient": lambda now: setattr(now.weight, "grad", None),
    "replaced_gradient": lambda now: setattr(now.weight, "grad", now.grad.detach() * 0.5),
    "loaded_model": lambda now: now.model.load_state_dict({n: v * 0.5 for n, v in now.model.state_dict().items()}),
    "data_of_a_state": lambda now: now.exp_avg.data.mul_(0.5),
    "state_in_place": lambda now: now.exp_avg.mul_(0.5),
    "kept_state": keeping(lambda now: now.exp_avg, lambda now, kept: kept.data),
    "kept_state_in_place": keeping(lambda now: now.exp_avg, lambda now, kept: kept),
    "kept_view_of_a_state": keeping(lambda now: now.exp_avg.data.view(-1), lambda now, kept: kept),
    "kept_states_of_a_parameter": keeping(
        lambda now: now.optimizer.state[now.weight], lambda now, kept: kept["exp_avg"].data
    ),
    "kept_states_of_all": keeping(lambda now: now.optimizer.state, lambda now, kept: kept[now.weight]["exp_avg"].data),
    "step_counter": lambda now: now.optimizer.state[now.weight]["step"].fill_(7.0),
}
for _name, _act in _NAMED.items():
    _act.__name__ = _name  # the tests' names

ACTS: list[UserAct] = [
    data_of_a_gradient, set_of_a_gradient, through_addresses, parameter_in_place, clip_in_the_step, another_rate,
    loaded_states, *_NAMED.values(), nothing_but_reading,
]  # fmt: skip
