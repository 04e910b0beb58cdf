"""The chunk store: where parameters live, a home without room, gradients that are stored, added and kept."""

from __future__ import annotations

import threading

import pytest
import torch
from store_cases import (
    CHANNELS_LAST,
    EMPTY,
    GROUPS,
    FullHome,
    layout_of,
    make_parameters,
    placed,
    random_gradients,
    sink_all,
    taking,
)
from torch import nn

from chunkc.ir.errors import HomeError
from chunkc.ir.layout import PARAM, Chunk
from chunkc.runtime.device.tier import CpuTier
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.homes import Home
from chunkc.runtime.store.store import ChunkStore

pytestmark = pytest.mark.timeout(30)


def test_to_the_tier_and_home_again_keeps_everything(home: Home) -> None:
    store, parameters = placed(home)
    layout, expected = store.layout, make_parameters()
    assert parameters["conv"].is_contiguous(memory_format=CHANNELS_LAST)
    assert store.views.parameters() == parameters
    assert all(p.data_ptr() == store.views.home_view("param", name).data_ptr() for name, p in parameters.items())
    gradients = random_gradients(1, parameters)
    sink_all(store, gradients, Chunk("grad", 0))
    home_nbytes = store.arena.nbytes
    for resident in (frozenset({0}), frozenset({0, 1, 2}), frozenset()):
        store.place(layout, {}, resident)
        assert store.resident == resident
        for name, p in parameters.items():
            assert torch.equal(p, expected[name])
            assert p.stride() == expected[name].stride()
            assert store.views.is_managed(name) == (store.views.group_index(name) not in resident)
        for name, gradient in gradients.items():
            assert torch.equal(parameters[name].grad, gradient)
            assert parameters[name].grad.stride() == parameters[name].stride()
        assert parameters["last"].grad is None
    assert store.arena.nbytes == home_nbytes
    sink_all(store, gradients, Chunk("grad", 0))  # and gradients still accumulate
    for name, gradient in gradients.items():
        assert torch.equal(parameters[name].grad, gradient + gradient)


def test_a_resident_group_takes_no_room_at_home() -> None:
    store, parameters = placed(resident=frozenset({0, 1, 2}))
    assert store.arena.nbytes == 0
    before = {name: p.data_ptr() for name, p in make_parameters().items()}
    assert before.keys() == parameters.keys()
    store.place(store.layout, {}, frozenset({0, 1}))
    assert store.arena.nbytes == store.layout.groups[2].nbytes("param")  # gradients will have room where they come
    store.place(store.layout, {}, frozenset({0, 1, 2}))
    assert store.arena.nbytes == 0


def test_a_gradient_that_another_thread_trains_stays_where_it_is(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    store, parameters = placed(home, resident=frozenset({0, 1, 2}))
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    grads = {name: parameter.grad for name, parameter in parameters.items()}
    another = threading.Thread(target=lambda: store.trainers.claim(frozenset(parameters)))
    another.start()
    another.join()
    with monkeypatch.context() as patch:
        for module in ("store", "gradient_states"):
            patch.setattr(f"chunkc.runtime.store.{module}.gradient_of", lambda parameter: pytest.fail("it was read"))
        store.place(store.layout, {}, frozenset())
    assert all(parameter.grad is grads[name] for name, parameter in parameters.items())
    assert all(store.views.is_managed(name) for name in parameters)


def test_a_layout_is_extended(home: Home) -> None:
    """A second graph brings new parameters: the first one's stay where they are."""
    parameters = make_parameters()
    first = {name: parameters[name] for name in ("conv", "matrix")}
    store = ChunkStore(EMPTY, Arena(home), CpuTier(), True)
    store.place(layout_of(first, GROUPS[:1]), first, frozenset())
    addresses = [p.data_ptr() for p in first.values()]
    others = {name: parameters[name] for name in ("frozen", "last")}
    store.place(layout_of(parameters), others, frozenset({2}))
    assert [p.data_ptr() for p in first.values()] == addresses
    assert store.views.is_managed("frozen")
    assert not store.views.is_managed("last")
    expected = make_parameters()
    assert all(torch.equal(p, expected[name]) for name, p in parameters.items())


def test_one_tensor_at_a_time(home: Home) -> None:
    """Room, then values, then the place: whoever makes a model in its chunks has one tensor in memory."""
    expected = make_parameters()
    store = ChunkStore(EMPTY, Arena(home), CpuTier(), True)
    store.reserve(layout_of(expected), frozenset())
    assert store.views.parameters() == {}
    made = {}
    for name, values in expected.items():
        store.write(PARAM, name, values)
        made[name] = nn.Parameter(torch.empty(0), requires_grad=values.requires_grad)
        store.bind(name, made[name])
        assert torch.equal(made[name], values)
        assert made[name].stride() == values.stride()
    assert store.replaced(list(made)) == []
    first = next(iter(made))
    store.write(PARAM, first, torch.full_like(expected[first], 3.0))
    assert bool((made[first] == 3.0).all())


@pytest.mark.parametrize("num_pages", [0, 1, 2, 3])
def test_a_full_home_moves_no_parameter(num_pages: int) -> None:
    parameters = make_parameters()
    parameters["last"].grad = torch.ones(2, 64)
    addresses = {name: p.data_ptr() for name, p in parameters.items()}
    layout = layout_of(parameters)
    home = FullHome(num_pages * 4096)
    store = ChunkStore(EMPTY, Arena(home), CpuTier(), True)
    with pytest.raises(HomeError, match="no room"):
        store.place(layout, parameters, frozenset())
    assert {name: p.data_ptr() for name, p in parameters.items()} == addresses
    assert parameters["last"].grad.tolist() == [[1.0] * 64] * 2
    assert store.layout == EMPTY
    assert store.views.parameters() == {}
    assert store.arena.nbytes == 0
    assert home._mappings == {}  # what was reserved is given back
    home.free_nbytes = 1 << 20
    store.place(layout, parameters, frozenset())  # and works once there is room
    assert all(torch.equal(p, e) for p, e in zip(parameters.values(), make_parameters().values()))


def test_room_for_states_is_all_or_nothing() -> None:
    home = FullHome(1 << 20)
    store, _ = placed(home)
    home_nbytes, num_regions = store.arena.nbytes, len(home._mappings)
    home.free_nbytes = 2 * 4096
    with pytest.raises(HomeError, match="no room"):
        store.reserve_states(0)
    assert (store.arena.nbytes, len(home._mappings)) == (home_nbytes, num_regions)
    home.free_nbytes = 1 << 20
    store.reserve_states(0)
    reserved_nbytes = store.arena.nbytes
    assert reserved_nbytes == home_nbytes + sum(2 * store.layout.groups[g].nbytes("exp_avg") for g in (0, 2))
    store.reserve_states(2)  # came with the first
    assert store.arena.nbytes == reserved_nbytes
    assert not store.views.home_view("exp_avg", "conv").any()
    assert store.views.home_view("exp_avg_sq", "conv").stride() == make_parameters()["conv"].stride()


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
