"""The chunk store: parameters and gradients keep their values wherever their home is."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from chunkc.ir.chunks import ChunkGroup, ChunkLayout, ParamSpec, TensorSlice, chunk_name
from chunkc.ir.errors import ChunkStateError, HomeError, StreamError, UnsupportedError
from chunkc.runtime.arena import MAX_REGIONS_PER_CALL, Arena
from chunkc.runtime.homes import DiskHome, Home, MemoryHome
from chunkc.runtime.states import ChunkState
from chunkc.runtime.store import ChunkStore
from chunkc.runtime.streams import WorkerStream
from chunkc.runtime.tier import CpuTier

pytestmark = pytest.mark.timeout(30)

EMPTY = ChunkLayout(0, (), ())
CHANNELS_LAST = torch.channels_last

Parameters = dict[str, nn.Parameter]


def make_parameters(dtype: torch.dtype = torch.float32) -> Parameters:
    """Two parameters of group 0, one of them with permuted strides; a frozen one of group 1; group 2's."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "conv": nn.Parameter(random(4, 3, 5, 5).contiguous(memory_format=CHANNELS_LAST)),
        "matrix": nn.Parameter(random(6, 7).t()),
        "frozen": nn.Parameter(random(33), requires_grad=False),
        "last": nn.Parameter(random(2, 64)),
    }


GROUPS = (("conv", "matrix"), ("frozen",), ("last",))


def layout_of(parameters: Parameters, groups: tuple[tuple[str, ...], ...] = GROUPS) -> ChunkLayout:
    """Each tuple of names is one group; tensors start at multiples of 64 elements."""
    made = []
    for index, names in enumerate(groups):
        slices, offset = [], 0
        for name in names:
            p = parameters[name]
            spec = ParamSpec(name, tuple(p.shape), p.stride(), p.dtype, p.requires_grad)
            slices.append(TensorSlice(spec, offset))
            offset += -(-spec.numel // 64) * 64
        first = parameters[names[0]]
        made.append(ChunkGroup(index, first.dtype, first.requires_grad, offset, tuple(slices)))
    return ChunkLayout(4096, tuple(made), ())


def placed(
    home: Home | None = None,
    *,
    resident: frozenset[int] = frozenset(),
    debug: bool = True,
    **options: torch.dtype,
) -> tuple[ChunkStore, Parameters]:
    """A store with `make_parameters` placed in it."""
    parameters = make_parameters(**options)
    store = ChunkStore(EMPTY, Arena(home or MemoryHome()), CpuTier(), debug)
    store.place(layout_of(parameters), parameters, resident)
    return store, parameters


@pytest.fixture(params=["cpu", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    yield (opened := MemoryHome() if request.param == "cpu" else DiskHome(str(tmp_path)))
    opened.close()


def fetch(store: ChunkStore, chunk: str) -> None:
    store.prefetch(chunk)
    store.wait(chunk)


def put_back(store: ChunkStore, chunk: str) -> None:
    store.write_back(chunk)
    store.wait(chunk)
    store.evict(chunk)


def taking(gradient: Tensor) -> Callable[[], Tensor]:
    return lambda: gradient


def sink_all(store: ChunkStore, gradients: dict[str, Tensor], chunk: str) -> None:
    """A backward pass: the gradient chunk comes, takes gradients and goes home."""
    fetch(store, chunk)
    for name, gradient in gradients.items():
        store.sink(name, chunk, taking(gradient), owned=True)
    put_back(store, chunk)


def random_gradients(seed: int, parameters: Parameters, *names: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameters[name].shape, generator=generator).to(parameters[name].dtype)
        for name in names or ("conv", "matrix")
    }


# ---------------------------------------------------------------- places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_placing_keeps_values_strides_and_identity(home: Home, dtype: torch.dtype) -> None:
    expected = make_parameters(dtype)
    store, parameters = placed(home, dtype=dtype)
    for name, p in parameters.items():
        assert torch.equal(p, expected[name])
        assert p.stride() == expected[name].stride()
        assert p.dtype is dtype
        assert p.requires_grad == expected[name].requires_grad
        assert p.is_leaf
        assert store.is_managed(name)
        assert p.data_ptr() == store.home_view("param", name).data_ptr()
    assert parameters["conv"].is_contiguous(memory_format=CHANNELS_LAST)
    assert store.parameters() == parameters


def test_a_write_to_a_home_view_reaches_the_slot_and_back(home: Home) -> None:
    """What an ordinary optimizer writes between calls is what the next prefetch brings, and the reverse."""
    store, parameters = placed(home)
    with torch.no_grad():
        parameters["matrix"].copy_(torch.arange(42.0).view(7, 6))
    fetch(store, "param:0")
    view = store.parameter_view("param:0", "matrix")
    assert torch.equal(view, torch.arange(42.0).view(7, 6))
    assert view.stride() == parameters["matrix"].stride()
    assert view.data_ptr() != parameters["matrix"].data_ptr()
    store.begin_compute("param:0")
    view.mul_(2)
    store.end_compute("param:0", wrote=True)
    put_back(store, "param:0")
    assert torch.equal(parameters["matrix"], 2 * torch.arange(42.0).view(7, 6))
    assert torch.equal(parameters["conv"], make_parameters()["conv"])


def test_to_the_tier_and_home_again_keeps_everything(home: Home) -> None:
    store, parameters = placed(home)
    layout, expected = store.layout, make_parameters()
    gradients = random_gradients(1, parameters)
    sink_all(store, gradients, "grad:0")
    home_nbytes = store.arena.nbytes
    for resident in (frozenset({0}), frozenset({0, 1, 2}), frozenset()):
        store.place(layout, {}, resident)
        assert store.resident == resident
        for name, p in parameters.items():
            assert torch.equal(p, expected[name])
            assert p.stride() == expected[name].stride()
            assert store.is_managed(name) == (store.group_index(name) not in resident)
        for name, gradient in gradients.items():
            assert torch.equal(parameters[name].grad, gradient)
            assert parameters[name].grad.stride() == parameters[name].stride()
        assert parameters["last"].grad is None
    assert store.arena.nbytes == home_nbytes
    sink_all(store, gradients, "grad:0")  # and gradients still accumulate
    for name, gradient in gradients.items():
        assert torch.equal(parameters[name].grad, gradient + gradient)


def test_a_resident_group_takes_no_room_at_home() -> None:
    store, parameters = placed(resident=frozenset({0, 1, 2}))
    assert store.arena.nbytes == 0
    before = {name: p.data_ptr() for name, p in make_parameters().items()}
    assert before.keys() == parameters.keys()
    store.place(store.layout, {}, frozenset({0, 1}))
    assert store.arena.nbytes == 2 * store.layout.groups[2].nbytes("param")
    store.place(store.layout, {}, frozenset({0, 1, 2}))
    assert store.arena.nbytes == 0


def test_placing_resident_parameters_moves_nothing() -> None:
    parameters = make_parameters()
    addresses = {name: p.data_ptr() for name, p in parameters.items()}
    store = ChunkStore(EMPTY, Arena(MemoryHome()), CpuTier())
    store.place(layout_of(parameters), parameters, frozenset({0, 1, 2}))
    assert {name: p.data_ptr() for name, p in parameters.items()} == addresses


def test_a_gradient_from_before_is_adopted(home: Home) -> None:
    parameters = make_parameters()
    gradients = random_gradients(1, parameters)
    for name, gradient in gradients.items():
        parameters[name].grad = gradient.clone()
    store = ChunkStore(EMPTY, Arena(home), CpuTier(), True)
    store.place(layout_of(parameters), parameters, frozenset())
    for name, gradient in gradients.items():
        assert torch.equal(parameters[name].grad, gradient)
        assert parameters[name].grad.data_ptr() == store.home_view("grad", name).data_ptr()
    sink_all(store, gradients, "grad:0")
    for name, gradient in gradients.items():
        assert torch.equal(parameters[name].grad, 2 * gradient)


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
    assert store.is_managed("frozen")
    assert not store.is_managed("last")
    expected = make_parameters()
    assert all(torch.equal(p, expected[name]) for name, p in parameters.items())


def test_many_chunks_share_few_regions() -> None:
    """A region of a disk home takes two file descriptors."""
    parameters = {f"p{i}": nn.Parameter(torch.full((64,), float(i))) for i in range(100)}
    home = MemoryHome()
    store = ChunkStore(EMPTY, Arena(home), CpuTier(), True)
    store.place(layout_of(parameters, tuple((name,) for name in parameters)), parameters, frozenset())
    assert len(home._mappings) <= MAX_REGIONS_PER_CALL
    for i in (0, 1, 57, 99):
        fetch(store, f"param:{i}")
        assert store.parameter_view(f"param:{i}", f"p{i}").tolist() == [float(i)] * 64


# ---------------------------------------------------------------- a home without room


class FullHome(MemoryHome):
    """A home with room for so many bytes."""

    def __init__(self, free_nbytes: int) -> None:
        super().__init__()
        self.free_nbytes = free_nbytes

    def _map(self, nbytes: int) -> object:
        if nbytes > self.free_nbytes:
            raise HomeError(f"no room for {nbytes} bytes")
        self.free_nbytes -= nbytes
        return super()._map(nbytes)


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
    assert store.parameters() == {}
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
    assert not store.home_view("exp_avg", "conv").any()
    assert store.home_view("exp_avg_sq", "conv").stride() == make_parameters()["conv"].stride()


def test_states_of_16_bit_parameters_have_an_fp32_master() -> None:
    store, _ = placed(dtype=torch.bfloat16)
    store.reserve_states(0)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert store.home_view(kind, "matrix").dtype is torch.float32
    assert store.home_view("grad", "matrix").dtype is torch.bfloat16


# ---------------------------------------------------------------- slots


def test_debug_fills_slots_with_nan_when_taken_and_given_back() -> None:
    store, _ = placed()
    store.prefetch("grad:0")  # no gradients yet: nothing is read
    store.wait("grad:0")
    fresh = store.slot("grad:0").buffer
    assert fresh.isnan().all()
    store.evict("grad:0")
    fetch(store, "param:0")
    buffer = store.slot("param:0").buffer
    view = store.parameter_view("param:0", "conv")
    assert not view.isnan().any()
    store.evict("param:0")
    assert buffer.isnan().all()
    assert view.isnan().all()  # a reader that came too late
    assert store.slot("param:0").buffer is None


def test_without_debug_a_released_slot_is_left_alone() -> None:
    store, parameters = placed(debug=False)
    fetch(store, "param:2")
    buffer = store.slot("param:2").buffer
    store.evict("param:2")
    assert torch.equal(buffer.view(2, 64), parameters["last"])


def test_only_a_chunk_that_is_there_and_ready_is_read() -> None:
    store, _ = placed()
    for prepare in (lambda: None, lambda: store.prefetch("param:0")):
        prepare()
        with pytest.raises(ChunkStateError, match="conv is read from chunk param:0"):
            store.parameter_view("param:0", "conv")
        with pytest.raises(ChunkStateError):
            store.begin_compute("param:0")
    store.wait("param:0")
    store.parameter_view("param:0", "conv")
    with pytest.raises(ChunkStateError, match="HOLD to PREFETCHING"):
        store.prefetch("param:0")


def test_a_chunk_under_a_copy_or_in_use_is_not_evicted() -> None:
    store, _ = placed()
    store.prefetch("param:0")
    with pytest.raises(ChunkStateError, match="PREFETCHING to FREE"):
        store.evict("param:0")
    store.wait("param:0")
    store.begin_compute("param:0")
    with pytest.raises(ChunkStateError, match="COMPUTE to FREE"):
        store.evict("param:0")
    store.end_compute("param:0", wrote=True)
    with pytest.raises(ChunkStateError, match="before it was written back"):
        store.evict("param:0")
    store.write_back("param:0")
    with pytest.raises(ChunkStateError, match="EVICTING to FREE"):
        store.evict("param:0")
    store.wait("param:0")
    store.evict("param:0")
    assert store.present == frozenset()


def test_a_clean_chunk_is_not_copied_home() -> None:
    store, _ = placed()
    fetch(store, "param:0")
    put_back(store, "param:0")
    nbytes = store.layout.groups[0].nbytes("param")
    assert (store.traffic.to_device_nbytes, store.traffic.to_home_nbytes) == (nbytes, 0)
    fetch(store, "param:0")
    store.begin_compute("param:0")
    store.end_compute("param:0", wrote=True)
    put_back(store, "param:0")
    assert (store.traffic.to_device_nbytes, store.traffic.to_home_nbytes) == (2 * nbytes, nbytes)


def test_waiting_is_measured() -> None:
    parameters = make_parameters()
    store = ChunkStore(EMPTY, Arena(MemoryHome()), CpuTier(delay=lambda: 0.03))
    store.place(layout_of(parameters), parameters, frozenset())
    fetch(store, "param:0")
    assert 0.02 < store.traffic.wait_s < 5


# ---------------------------------------------------------------- gradients


def test_gradients_are_stored_then_added(home: Home) -> None:
    store, parameters = placed(home)
    first, second = random_gradients(1, parameters), random_gradients(2, parameters)
    sink_all(store, first, "grad:0")
    for name, gradient in first.items():
        assert torch.equal(parameters[name].grad, gradient)
        assert parameters[name].grad.stride() == parameters[name].stride()
    kept = parameters["conv"].grad
    sink_all(store, second, "grad:0")
    for name in first:
        assert torch.equal(parameters[name].grad, first[name] + second[name])
    assert parameters["conv"].grad is kept  # in place, as in PyTorch


def test_only_parameters_with_a_gradient_get_one() -> None:
    store, parameters = placed()
    sink_all(store, random_gradients(1, parameters, "matrix"), "grad:0")
    assert parameters["conv"].grad is None
    gradients = random_gradients(2, parameters, "conv")
    sink_all(store, gradients, "grad:0")
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
    sink_all(store, gradients, "grad:0")
    assert torch.equal(parameters["conv"].grad, before + gradients["conv"])
    assert torch.equal(parameters["matrix"].grad, gradients["matrix"])
    assert parameters["conv"].grad.data_ptr() == store.home_view("grad", "conv").data_ptr()


def test_a_gradient_replaced_after_a_backward_is_absorbed_and_the_old_one_stays() -> None:
    """`old = p.grad; p.grad = other`: `old` is the user's own tensor from then on, as in PyTorch."""
    store, parameters = placed()
    first, second = random_gradients(1, parameters), random_gradients(2, parameters)
    sink_all(store, first, "grad:0")
    old = parameters["conv"].grad
    parameters["conv"].grad = torch.ones(4, 3, 5, 5)
    sink_all(store, second, "grad:0")
    assert torch.equal(parameters["conv"].grad, 1 + second["conv"])
    assert torch.equal(old, first["conv"])


def test_a_gradient_that_is_still_held_keeps_its_values() -> None:
    """`old = p.grad; optimizer.zero_grad()`: the next backward must not write into `old`."""
    store, parameters = placed()
    first, second = random_gradients(1, parameters), random_gradients(2, parameters)
    sink_all(store, first, "grad:0")
    old = {name: parameters[name].grad for name in first}
    for name in first:
        parameters[name].grad = None
    sink_all(store, second, "grad:0")
    for name in first:
        assert torch.equal(old[name], first[name])
        assert old[name].stride() == parameters[name].stride()
        assert torch.equal(parameters[name].grad, second[name])
    third = random_gradients(3, parameters)
    sink_all(store, third, "grad:0")
    assert torch.equal(old["conv"], first["conv"])
    assert torch.equal(parameters["conv"].grad, second["conv"] + third["conv"])


def test_zero_grad_either_way() -> None:
    store, parameters = placed()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    first, second = random_gradients(1, parameters), random_gradients(2, parameters)
    sink_all(store, first, "grad:0")
    optimizer.zero_grad(set_to_none=False)
    assert not parameters["conv"].grad.any()
    moved_nbytes = store.traffic.to_device_nbytes
    sink_all(store, second, "grad:0")
    assert torch.equal(parameters["conv"].grad, second["conv"])
    assert store.traffic.to_device_nbytes > moved_nbytes  # there was a gradient, of zeros
    optimizer.zero_grad(set_to_none=True)
    assert parameters["conv"].grad is None
    moved_nbytes = store.traffic.to_device_nbytes
    sink_all(store, first, "grad:0")
    assert torch.equal(parameters["conv"].grad, first["conv"])
    assert store.traffic.to_device_nbytes == moved_nbytes  # nothing to read


def test_a_resident_parameter_takes_an_owned_gradient_as_it_is() -> None:
    store, parameters = placed(resident=frozenset({2}))
    owned = torch.randn(2, 64)
    store.sink("last", None, taking(owned), owned=True)
    assert parameters["last"].grad is owned
    store.sink("last", None, taking(torch.ones(2, 64)), owned=True)
    assert parameters["last"].grad is owned  # added in place


@pytest.mark.parametrize("reason", ["not owned", "strides", "a view"])
def test_a_resident_parameter_copies_any_other_gradient(reason: str) -> None:
    store, parameters = placed(resident=frozenset({2}))
    gradient = {
        "not owned": torch.randn(2, 64),
        "strides": torch.randn(64, 2).t(),
        "a view": torch.randn(4, 64)[:2],
    }[reason]
    store.sink("last", None, taking(gradient), owned=reason != "not owned")
    taken = parameters["last"].grad
    assert torch.equal(taken, gradient)
    assert taken.data_ptr() != gradient.data_ptr()
    assert taken.stride() == parameters["last"].stride()


# ---------------------------------------------------------------- failures


def failing(error: Exception) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [HomeError("the disk is on fire"), ZeroDivisionError("oops")])
def test_a_failed_read_is_raised_at_the_wait_and_releases_all_the_same(error: Exception) -> None:
    store, parameters = placed()
    read = store.arena.home.read
    store.arena.home.read = failing(error)  # type: ignore[method-assign]
    store.prefetch("param:0")
    store.arena.home.read = read  # type: ignore[method-assign]
    store.prefetch("param:1")
    expected = HomeError if isinstance(error, HomeError) else StreamError
    with pytest.raises(expected, match=str(error)):
        store.wait("param:0")
    with pytest.raises(expected, match=str(error)):
        store.release_slots()
    assert store.present == frozenset()
    assert all(slot.buffer is None for slot in store._slots.values())
    store.release_slots()  # nothing is left to tell
    fetch(store, "param:0")
    assert torch.equal(store.parameter_view("param:0", "conv"), parameters["conv"])


def test_release_writes_dirty_chunks_home() -> None:
    """An interrupted step: what is in slots, in whatever state, is brought home."""
    store, parameters = placed()
    fetch(store, "grad:0")
    gradients = random_gradients(1, parameters)
    for name, gradient in gradients.items():
        store.sink(name, "grad:0", taking(gradient), owned=True)
    fetch(store, "param:0")
    store.begin_compute("param:0")
    store.prefetch("param:2")
    store.release_slots()
    assert {slot.state for slot in store._slots.values()} == {ChunkState.FREE}
    assert all(torch.equal(parameters[name].grad, gradient) for name, gradient in gradients.items())
    assert torch.equal(parameters["conv"], make_parameters()["conv"])


def test_release_ends_a_write_back_under_way() -> None:
    parameters = make_parameters()
    store = ChunkStore(EMPTY, Arena(MemoryHome()), CpuTier(delay=lambda: 0.03), True)
    store.place(layout_of(parameters), parameters, frozenset())
    fetch(store, "param:2")
    store.begin_compute("param:2").fill_(7)
    store.end_compute("param:2", wrote=True)
    store.write_back("param:2")
    store.release_slots()
    assert parameters["last"].tolist() == [[7.0] * 64] * 2


def test_a_gradient_that_could_not_be_written_home_is_none() -> None:
    store, parameters = placed()
    fetch(store, "grad:0")
    for name, gradient in random_gradients(1, parameters).items():
        store.sink(name, "grad:0", taking(gradient), owned=True)
    fetch(store, "grad:2")
    last = torch.randn(2, 64)
    store.sink("last", "grad:2", taking(last), owned=True)
    write = store.arena.home.write
    store.arena.home.write = failing(HomeError("the disk is on fire"))  # type: ignore[method-assign]
    store.write_back("grad:0")
    with pytest.raises(HomeError, match="on fire"):
        store.wait("grad:0")
    store.arena.home.write = write  # type: ignore[method-assign]
    with pytest.raises(HomeError, match="on fire"):
        store.release_slots()
    assert store.present == frozenset()
    assert parameters["conv"].grad is None
    assert parameters["matrix"].grad is None
    assert torch.equal(parameters["last"].grad, last)  # the other chunk did get home
    gradients = random_gradients(2, parameters)
    sink_all(store, gradients, "grad:0")
    assert torch.equal(parameters["conv"].grad, gradients["conv"])


def test_a_dead_parameter_is_named() -> None:
    store, parameters = placed()
    del parameters["matrix"]
    gc.collect()
    assert set(store.parameters()) == {"conv", "frozen", "last"}
    assert store.parameter("conv") is parameters["conv"]
    with pytest.raises(UnsupportedError, match="matrix no longer exists"):
        store.parameter("matrix")
    with pytest.raises(UnsupportedError, match="matrix no longer exists"):
        store.prefetch("grad:0")
    store.release_slots()
    assert store.present == frozenset()
    store.place(store.layout, {}, frozenset({0}))  # the others of its group still move
    assert torch.equal(parameters["conv"], make_parameters()["conv"])


def test_a_lost_gradient_of_a_dead_parameter_does_not_stop_the_release() -> None:
    """All slots are given back, and the failed copy is what is raised."""
    store, parameters = placed()
    fetch(store, "grad:0")
    for name, gradient in random_gradients(1, parameters).items():
        store.sink(name, "grad:0", taking(gradient), owned=True)
    fetch(store, "param:2")
    del parameters["conv"]
    gc.collect()
    store.arena.home.write = failing(HomeError("the disk is on fire"))  # type: ignore[method-assign]
    with pytest.raises(HomeError, match="on fire"):
        store.release_slots()
    assert store.present == frozenset()
    assert parameters["matrix"].grad is None


def test_a_store_dies_with_its_user() -> None:
    """The store holds parameters weakly, and its threads end with it."""
    store, parameters = placed()
    fetch(store, "param:0")
    store.release_slots()
    parameter = parameters["conv"]
    del store
    gc.collect()
    assert torch.equal(parameter, make_parameters()["conv"])  # a home view outlives its store
    assert math.isfinite(float(parameter.detach().sum()))
    assert isinstance(CpuTier().to_device, WorkerStream)


def test_chunk_names_are_stable() -> None:
    assert chunk_name("exp_avg_sq", 12) == "exp_avg_sq:12"


@pytest.mark.parametrize("waited", [False, True])
def test_a_host_that_reads_home_memory_waits_for_the_write_back(waited: bool) -> None:
    parameters = make_parameters()
    store = ChunkStore(EMPTY, Arena(MemoryHome()), CpuTier(delay=lambda: 0.03), True)
    store.place(layout_of(parameters), parameters, frozenset())
    fetch(store, "grad:2")
    store.sink("last", "grad:2", taking(torch.full((2, 64), 3.0)), owned=True)
    store.write_back("grad:2")
    if waited:
        store.wait("grad:2")
        store.evict("grad:2")
    else:
        assert not parameters["last"].grad.any()
    store.await_home("grad:2")
    assert (parameters["last"].grad == 3.0).all()
    store.release_slots()
