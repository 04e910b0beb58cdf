"""A store with four parameters in three chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from chunkc.ir.errors import HomeError
from chunkc.ir.layout import ChunkGroup, ChunkLayout, ParamSpec, TensorSlice
from chunkc.runtime.device.tier import CpuTier
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.homes import Home, MemoryHome, open_home
from chunkc.runtime.store.store import ChunkStore

EMPTY = ChunkLayout(0, (), ())


CHANNELS_LAST = torch.channels_last


Parameters = dict[str, nn.Parameter]


@pytest.fixture(params=["cpu", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """Yield either kind of home."""
    home = open_home("cpu") if request.param == "cpu" else open_home(f"disk:{tmp_path}")
    yield home
    home.close()


def make_parameters(dtype: torch.dtype = torch.float32) -> Parameters:
    """Make two parameters of group 0, one with permuted strides; a frozen one of group 1; group 2's."""
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
    """Make a layout with a group for each tuple of names; tensors start at multiples of 64 elements."""
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
    """Make a store with `make_parameters` placed in it."""
    parameters = make_parameters(**options)
    store = ChunkStore(EMPTY, Arena(home or MemoryHome()), CpuTier(), debug)
    store.place(layout_of(parameters), parameters, resident)
    return store, parameters


def fetch(store: ChunkStore, chunk: str) -> None:
    store.prefetch(chunk)
    store.slots.wait(chunk)


def put_back(store: ChunkStore, chunk: str) -> None:
    store.write_back(chunk)
    store.slots.wait(chunk)
    store.slots.evict(chunk)


def taking(gradient: Tensor) -> Callable[[], Tensor]:
    return lambda: gradient


def sink_all(store: ChunkStore, gradients: dict[str, Tensor], chunk: str) -> None:
    """Run a backward's instructions: fetch the gradient chunk, sink gradients, write it back."""
    fetch(store, chunk)
    for name, gradient in gradients.items():
        store.gradients.sink(name, chunk, taking(gradient), owned=True)
    put_back(store, chunk)


def random_gradients(seed: int, parameters: Parameters, *names: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameters[name].shape, generator=generator).to(parameters[name].dtype)
        for name in names or ("conv", "matrix")
    }


class FullHome(MemoryHome):
    """A home with room for a given number of bytes."""

    def __init__(self, free_nbytes: int) -> None:
        super().__init__()
        self.free_nbytes = free_nbytes

    def _map(self, nbytes: int) -> object:
        if nbytes > self.free_nbytes:
            raise HomeError(f"no room for {nbytes} bytes")
        self.free_nbytes -= nbytes
        return super()._map(nbytes)
