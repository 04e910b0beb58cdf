"""Swapping parameters on conversion (`torch.__future__.set_swap_module_params_on_conversion`).

Sessions know parameters by weak references, with which PyTorch swaps no tensors. It says so before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from harness import array, differences, gradients, weights
from optim_models import MLP, backward, build

SMALL, LARGE = 400 * 1024, 64 * 2**20


@pytest.fixture(autouse=True)
def _swapping(fresh_dynamo: None) -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def _converted(model: MLP) -> None:
    model.to(torch.bfloat16)


def _loaded(model: MLP) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def _assigned(model: MLP) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("budget_nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("change", [_converted, _assigned])
def test_swapped_parameters_are_refused_before_anything_changes(
    change: Callable[[MLP], None], budget_nbytes: int
) -> None:
    model, call = build("adopted", memory_budget=budget_nbytes)
    backward(call, 0)
    before = [weights(model), gradients(model), [p.data_ptr() for p in model.parameters()]]
    with pytest.raises(RuntimeError, match="swap"):
        change(model)
    assert not differences([weights(model), gradients(model), [p.data_ptr() for p in model.parameters()]], before)
    model.zero_grad()
    backward(call, 0)  # and it works on
    assert not differences(gradients(model), before[1])


@pytest.mark.parametrize("budget_nbytes", [SMALL, LARGE])
def test_values_are_loaded_where_they_are(budget_nbytes: int) -> None:
    """PyTorch copies loaded values before it swaps, and complains after that; without swapping it is content."""
    model, call = build("adopted", memory_budget=budget_nbytes)
    backward(call, 0)
    halves = [array(p) * 0.5 for p in model.parameters()]
    with pytest.raises(RuntimeError, match="swap"):
        _loaded(model)
    assert not differences([array(p) for p in model.parameters()], halves)
    torch.__future__.set_swap_module_params_on_conversion(False)
    _loaded(model)
    assert not differences([array(p) for p in model.parameters()], [half * 0.5 for half in halves])
