"""The chunk store: gradients that are stored, added, absorbed and kept."""

from __future__ import annotations

import pytest
import torch
from store_cases import CHANNELS_LAST, placed, random_gradients, sink_all, taking

from chunkc.ir.layout import Chunk
from chunkc.runtime.storage.homes import Home

pytestmark = pytest.mark.timeout(30)


def test_gradients_are_stored_then_added(home: Home) -> None:
    store, parameters = placed(home)
    first, second = random_gradients(1, parameters), random_gradients(2, parameters)
    sink_all(store, first, Chunk("grad", 0))
    for name, gradient in first.items():
        assert torch.equal(parameters[name].grad, gradient)
        assert parameters[name].grad.stride() == parameters[name].stride()
    kept = parameters["conv"].grad
    sink_all(store, second, Chunk("grad", 0))
    for name in first:
        assert torch.equal(parameters[name].grad, first[name] + second[name])
    assert parameters["conv"].grad is kept  # in place, as in PyTorch


def test_only_parameters_with_a_gradient_get_one() -> None:
    store, parameters = placed()
    sink_all(store, random_gradients(1, parameters, "matrix"), Chunk("grad", 0))
    assert parameters["conv"].grad is None
    gradients = random_gradients(2, parameters, "conv")
    sink_all(store, gradients, Chunk("grad", 0))
    assert torch.equal(parameters["conv"].grad, gradients["conv"])
    assert torch.equal(parameters["matrix"].grad, random_gradients(1, parameters, "matrix")["matrix"])


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_foreign_gradient_is_absorbed(contiguous: bool) -> None:
    """A gradient that the user put there is what the next one is added to."""
    store, parameters = placed()
    foreign = torch.randn(4, 3, 5, 5)
    if not contiguous:
        foreign = foreign.contiguous(memory_format=CHANNELS_LAST)
    before = foreign.clone()
    parameters["conv"].grad = foreign
    gradients = random_gradients(1, parameters)
    sink_all(store, gradients, Chunk("grad", 0))
    assert torch.equal(parameters["conv"].grad, before + gradients["conv"])
    assert torch.equal(parameters["matrix"].grad, gradients["matrix"])
    assert parameters["conv"].grad.data_ptr() == store.views.home_view("grad", "conv").data_ptr()


def test_a_gradient_replaced_after_a_backward_is_absorbed_and_the_old_one_stays() -> None:
    """`old = p.grad; p.grad = other`: `old` is the user's own tensor from then on, as in PyTorch."""
    store, parameters = placed()
    first, second = random_gradients(1, parameters), random_gradients(2, parameters)
    sink_all(store, first, Chunk("grad", 0))
    old = parameters["conv"].grad
    parameters["conv"].grad = torch.ones(4, 3, 5, 5)
    sink_all(store, second, Chunk("grad", 0))
    assert torch.equal(parameters["conv"].grad, 1 + second["conv"])
    assert torch.equal(old, first["conv"])


def test_a_gradient_that_is_still_held_keeps_its_values() -> None:
    """`old = p.grad; optimizer.zero_grad()`: the next backward must not write into `old`."""
    store, parameters = placed()
    first, second = random_gradients(1, parameters), random_gradients(2, parameters)
    sink_all(store, first, Chunk("grad", 0))
    old = {name: parameters[name].grad for name in first}
    for name in first:
        parameters[name].grad = None
    sink_all(store, second, Chunk("grad", 0))
    for name in first:
        assert torch.equal(old[name], first[name])
        assert old[name].stride() == parameters[name].stride()
        assert torch.equal(parameters[name].grad, second[name])
    third = random_gradients(3, parameters)
    sink_all(store, third, Chunk("grad", 0))
    assert torch.equal(old["conv"], first["conv"])
    assert torch.equal(parameters["conv"].grad, second["conv"] + third["conv"])


def test_zero_grad_either_way() -> None:
    store, parameters = placed()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    first, second = random_gradients(1, parameters), random_gradients(2, parameters)
    sink_all(store, first, Chunk("grad", 0))
    optimizer.zero_grad(set_to_none=False)
    assert not parameters["conv"].grad.any()
    moved_nbytes = store.slots.traffic.to_device_nbytes
    sink_all(store, second, Chunk("grad", 0))
    assert torch.equal(parameters["conv"].grad, second["conv"])
    assert store.slots.traffic.to_device_nbytes > moved_nbytes  # there was a gradient, of zeros
    optimizer.zero_grad(set_to_none=True)
    assert parameters["conv"].grad is None
    moved_nbytes = store.slots.traffic.to_device_nbytes
    sink_all(store, first, Chunk("grad", 0))
    assert torch.equal(parameters["conv"].grad, first["conv"])
    assert store.slots.traffic.to_device_nbytes == moved_nbytes  # nothing to read


def test_a_resident_parameter_takes_an_owned_gradient_as_it_is() -> None:
    store, parameters = placed(resident=frozenset({2}))
    owned = torch.randn(2, 64)
    store.gradients.sink("last", None, taking(owned), owned=True)
    assert parameters["last"].grad is owned
    store.gradients.sink("last", None, taking(torch.ones(2, 64)), owned=True)
    assert parameters["last"].grad is owned  # added in place


@pytest.mark.parametrize("reason", ["not owned", "strides", "a view"])
def test_a_resident_parameter_copies_any_other_gradient(reason: str) -> None:
    store, parameters = placed(resident=frozenset({2}))
    gradient = {
        "not owned": torch.randn(2, 64),
        "strides": torch.randn(64, 2).t(),
        "a view": torch.randn(4, 64)[:2],
    }[reason]
    store.gradients.sink("last", None, taking(gradient), owned=reason != "not owned")
    taken = parameters["last"].grad
    assert torch.equal(taken, gradient)
    assert taken.data_ptr() != gradient.data_ptr()
    assert taken.stride() == parameters["last"].stride()
