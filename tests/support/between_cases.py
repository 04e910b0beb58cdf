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


UserAct = Callable[[Between], None]


def data_of_a_gradient(now: Between) -> None:
    now.grad.data.clamp_(-1e-4, 1e-4)


def data_of_a_parameter(now: Between) -> None:
    now.weight.data.mul_(0.5)


def one_element(now: Between) -> None:
    now.grad.data.view(-1)[-1] = 0.25


def other_data_for_a_gradient(now: Between) -> None:
    now.grad.data = now.grad.detach() * 0.5


def other_data_for_a_parameter(now: Between) -> None:
    now.weight.data = now.weight.detach() * 0.5


def set_of_a_gradient(now: Between) -> None:
    now.grad.data.set_((now.grad * 0.5).untyped_storage())
    now.grad.set_(now.grad.detach() * 0.5)


def through_dlpack(now: Between) -> None:
    dlpack.from_dlpack(dlpack.to_dlpack(now.grad)).mul_(0.5)


def through_addresses(now: Between) -> None:
    """As libraries in C do. The device has the host's addresses for pinned memory."""
    if now.grad.is_cuda:
        torch.cuda.synchronize()
    ctypes.memset(now.grad.data_ptr(), 0, now.grad.nbytes // 2)


def through_the_storage(now: Between) -> None:
    torch.tensor([], dtype=now.grad.dtype, device=now.grad.device).set_(now.grad.untyped_storage()).mul_(0.5)


def kept_parameter(now: Between) -> None:
    if "data" in now.kept:
        now.kept["data"].mul_(0.5)
    now.kept["data"] = now.weight.data


def kept_view_of_a_parameter(now: Between) -> None:
    if "view" in now.kept:
        now.kept["view"].mul_(0.5)
    now.kept["view"] = now.weight.data.view(-1)[:7]


def lists_of_data(now: Between) -> None:
    torch._foreach_mul_([p.grad.data for p in now.model.parameters() if p.grad is not None], 0.5)


def in_place(now: Between) -> None:
    now.grad.mul_(0.5)


def parameter_in_place(now: Between) -> None:
    with torch.no_grad():
        now.weight.clamp_(-0.05, 0.05)


def clip_norm(now: Between) -> None:
    torch.nn.utils.clip_grad_norm_(now.model.parameters(), 1e-3)


def clip_values(now: Between) -> None:
    torch.nn.utils.clip_grad_value_(now.model.parameters(), 1e-4)


def clip_in_the_step(now: Between) -> None:
    now.optimizer.clip_grad_norm_(1e-3)


def dropped_gradients(now: Between) -> None:
    now.optimizer.zero_grad()


def zeroed_gradients(now: Between) -> None:
    now.optimizer.zero_grad(set_to_none=False)


def dropped_gradient(now: Between) -> None:
    now.weight.grad = None


def replaced_gradient(now: Between) -> None:
    now.weight.grad = now.grad.detach() * 0.5


def another_rate(now: Between) -> None:
    now.optimizer.param_groups[0]["lr"] *= 0.5


def loaded_model(now: Between) -> None:
    now.model.load_state_dict({name: value * 0.5 for name, value in now.model.state_dict().items()})


def loaded_states(now: Between) -> None:
    saved = now.optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"] * 0.5
    now.optimizer.load_state_dict(saved)


def data_of_a_state(now: Between) -> None:
    now.optimizer.state[now.weight]["exp_avg"].data.mul_(0.5)


def state_in_place(now: Between) -> None:
    now.optimizer.state[now.weight]["exp_avg"].mul_(0.5)


def kept_state(now: Between) -> None:
    if "state" in now.kept:
        now.kept["state"].data.mul_(0.5)
    now.kept["state"] = now.optimizer.state[now.weight]["exp_avg"]


def kept_state_in_place(now: Between) -> None:
    if "state" in now.kept:
        now.kept["state"].mul_(0.5)
    now.kept["state"] = now.optimizer.state[now.weight]["exp_avg"]


def kept_view_of_a_state(now: Between) -> None:
    if "state" in now.kept:
        now.kept["state"].mul_(0.5)
    now.kept["state"] = now.optimizer.state[now.weight]["exp_avg"].data.view(-1)


def kept_states_of_a_parameter(now: Between) -> None:
    if "states" in now.kept:
        now.kept["states"]["exp_avg"].data.mul_(0.5)
    now.kept["states"] = now.optimizer.state[now.weight]


def kept_states_of_all(now: Between) -> None:
    if "all" in now.kept:
        now.kept["all"][now.weight]["exp_avg"].data.mul_(0.5)
    now.kept["all"] = now.optimizer.state


def step_counter(now: Between) -> None:
    now.optimizer.state[now.weight]["step"].fill_(7.0)


def nothing_but_reading(now: Between) -> None:
    """Reads what training loops read: nothing has to be undone for it."""
    for parameter in now.model.parameters():
        assert torch.isfinite(parameter.grad.data).all()
        assert parameter.detach().norm() > 0
    now.model.state_dict()
    repr(now.weight)


ACTS: list[UserAct] = [
    data_of_a_gradient,
    data_of_a_parameter,
    one_element,
    other_data_for_a_gradient,
    other_data_for_a_parameter,
    set_of_a_gradient,
    through_dlpack,
    through_addresses,
    through_the_storage,
    kept_parameter,
    kept_view_of_a_parameter,
    lists_of_data,
    in_place,
    parameter_in_place,
    clip_norm,
    clip_values,
    clip_in_the_step,
    dropped_gradients,
    zeroed_gradients,
    dropped_gradient,
    replaced_gradient,
    another_rate,
    loaded_model,
    loaded_states,
    data_of_a_state,
    state_in_place,
    kept_state,
    kept_state_in_place,
    kept_view_of_a_state,
    kept_states_of_a_parameter,
    kept_states_of_all,
    step_counter,
    nothing_but_reading,
]
