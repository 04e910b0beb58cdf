"""The chunk store: gradients that are stored, added, absorbed and kept."""

from __future__ import annotations

import pytest
import torch
from store_cases import placed, random_gradients, sink_all, taking

from chunkc.ir.layout import Chunk

pytestmark = pytest.mark.timeout(30)


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
