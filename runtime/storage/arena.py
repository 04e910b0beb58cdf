"""Allocate chunks on the home tier: which chunk has which region of which home."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from chunkc.ir.errors import HomeError
from chunkc.ir.layout import Chunk, is_state
from chunkc.runtime.device.streams import Launch
from chunkc.runtime.storage.homes import Home, Region


@dataclass(frozen=True)
class _Allocation:
    """Home and region of a chunk."""

    home: Home
    region: Region


@dataclass(frozen=True)
class PutAside:
    """Allocations that chunks had before `Arena.put_aside`, for `Arena.put_back`."""

    wanted: tuple[tuple[Chunk, int], ...]
    allocations: Mapping[Chunk, _Allocation]
    untouched: Set[Chunk] = frozenset()


@dataclass
class Arena:
    """Home memory of all chunks of one model.

    Args:
        home: of parameters and gradients, and of optimizer states unless there is a `state_home`.
        state_home: of optimizer states: their home views need not be on the device.
        launches_only: parameters and gradients are copied by launches alone, from pinned memory or from memory in the
            device's reach; memory that needs a thread for copies is refused.
    """

    home: Home
    state_home: Home | None = None
    launches_only: bool = False
    _allocations: dict[Chunk, _Allocation] = field(default_factory=dict)
    _shadow_copies: dict[Chunk, _Allocation] = field(default_factory=dict)
    _promised: dict[Chunk, int] = field(default_factory=dict)
    _untouched: set[Chunk] = field(default_factory=set)
    _used_nbytes: int = 0

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._allocations or chunk in self._promised

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return (*self._allocations, *self._promised)

    @property
    def nbytes(self) -> int:
        """Bytes of all regions."""
        return sum(
            allocation.region.nbytes for allocation in (*self._allocations.values(), *self._shadow_copies.values())
        )

    @property
    def disk_free_nbytes(self) -> int | None:
        """Bytes that are free on the disk with optimizer states; None: they are on none."""
        return (self.state_home or self.home).disk_free_nbytes

    @property
    def used_nbytes(self) -> int:
        """Bytes of shadow copies, and of chunks that may be other than zeros: untouched chunks take no RAM."""
        return self._used_nbytes + sum(allocation.region.nbytes for allocation in self._shadow_copies.values())

    def reserve(self, wanted: Mapping[Chunk, int]) -> None:
        """Allocate zeroed memory for chunks of the given bytes: for all of them or for none.

        Raises:
            HomeError: the home tier has no room, or none of the kind that it must be.
        """
        new = self._allocate(wanted)
        self._allocations.update(new)
        self._untouched.update(new)
        for chunk in new:
            self._promised.pop(chunk, None)

    def promise(self, wanted: Mapping[Chunk, int]) -> None:
        """Note chunks of the given bytes, to be allocated, all zeros, with their first read or write."""
        self._promised.update(wanted)

    def is_promised(self, chunk: Chunk) -> bool:
        """Whether a chunk is not allocated yet."""
        return chunk in self._promised

    def keep_promises(self, chunks: Iterable[Chunk]) -> None:
        """Allocate promised chunks among these now.

        Raises:
            HomeError: as `reserve`.
        """
        if wanted := {chunk: self._promised[chunk] for chunk in chunks if chunk in self._promised}:
            self.reserve(wanted)

    def reserve_shadow_copies(self, wanted: Mapping[Chunk, int]) -> None:
        """Allocate shadow copies of chunks, for all of them or for none; `swap` makes a shadow copy the home.

        Raises:
            HomeError: as `reserve`.
        """
        self._shadow_copies.update(self._allocate(wanted))

    def _allocate(self, wanted: Mapping[Chunk, int]) -> dict[Chunk, _Allocation]:
        new: dict[Chunk, _Allocation] = {}
        try:
            for chunk, nbytes in wanted.items():
                home = self._home_of(chunk.kind)
                allocation = new[chunk] = _Allocation(home, home.allocate(nbytes))
                is_launched = home.is_in_reach or home.only_launches(allocation.region)
                if self.launches_only and not is_state(chunk.kind) and not is_launched:
                    raise HomeError(
                        f"{chunk} of a distributed model is gathered from pinned memory, and this host's could not be "
                        "pinned: raise the limit of lockable memory (`ulimit -l`)"
                    )
        except BaseException:
            _free(new.values())
            raise
        return new

    def has_shadow_copy(self, chunk: Chunk) -> bool:
        """Whether a chunk has a shadow copy."""
        return chunk in self._shadow_copies

    def swap(self, chunk: Chunk) -> None:
        """Swap a chunk's home and its shadow copy. Views keep the memory that they were made over."""
        self._allocations[chunk], self._shadow_copies[chunk] = self._shadow_copies[chunk], self._touched(chunk)

    def is_zero(self, chunk: Chunk) -> bool:
        """Whether a chunk is all zeros still: no view or job that may write it has been made."""
        return chunk in self._untouched or chunk in self._promised

    def forget(self, chunk: Chunk) -> None:
        """Zero a chunk that has no views, so that it takes no RAM; a home that cannot do that leaves it as it is."""
        if chunk in self._promised:
            return
        allocation = self._allocations[chunk]
        if chunk not in self._untouched and allocation.home.forget(allocation.region):
            self._untouched.add(chunk)
            self._used_nbytes -= allocation.region.nbytes

    def _home_of(self, kind: str) -> Home:
        return (self.state_home or self.home) if is_state(kind) else self.home

    def free(self, chunks: Iterable[Chunk]) -> None:
        """Free chunks and their shadow copies; each region is kept until its last view is gone."""
        chunks = [chunk for chunk in chunks if self._promised.pop(chunk, None) is None]
        for chunk in chunks:
            allocation = self._touched(chunk)
            self._used_nbytes -= allocation.region.nbytes
        _free([self._allocations.pop(chunk) for chunk in chunks])
        _free([self._shadow_copies.pop(chunk) for chunk in chunks if chunk in self._shadow_copies])

    def replace(self, chunk: Chunk, nbytes: int) -> None:
        """Allocate a new region, all zeros, for a chunk; free the former one with its last view.

        Raises:
            HomeError: the home tier has no room; the chunk keeps its region.
        """
        former = self._touched(chunk)
        self.reserve({chunk: nbytes})
        self._used_nbytes -= former.region.nbytes
        former.home.free(former.region)

    def put_aside(self, wanted: Mapping[Chunk, int]) -> PutAside:
        """Make chunks of the given bytes unallocated; return their allocations for `put_back`."""
        aside = PutAside(tuple(wanted.items()), {c: self._allocations.pop(c) for c in wanted if c in self._allocations})
        self._promised.update({chunk: nbytes for chunk, nbytes in wanted.items() if chunk in aside.allocations})
        return replace(aside, untouched=self._untouched.intersection(aside.allocations))

    def put_back(self, aside: PutAside) -> None:
        """Undo `put_aside`; regions allocated since are freed with their last views."""
        for chunk, nbytes in aside.wanted:
            allocation, is_known = aside.allocations.get(chunk), chunk in self
            self.free([chunk] if is_known else [])
            self._untouched.discard(chunk)
            if not is_known:  # the chunk was freed meanwhile
                if allocation is not None:
                    self._used_nbytes -= 0 if chunk in aside.untouched else allocation.region.nbytes
                    _free([allocation])
            elif allocation is not None:
                self._allocations[chunk] = allocation
                self._untouched.update(aside.untouched & {chunk})
            else:
                self._promised[chunk] = nbytes

    def is_shared_with_forks(self, kind: str) -> bool:
        """Whether a child of `os.fork` would share the bytes of chunks of this kind."""
        return self._home_of(kind).is_shared_with_forks

    def view(
        self, chunk: Chunk, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset_nbytes: int
    ) -> torch.Tensor:
        """Make a home view of elements of a chunk (see `Home.tensor`)."""
        allocation = self._touched(chunk)
        return allocation.home.tensor(allocation.region, dtype, shape, stride, offset_nbytes)

    def address(self, chunk: Chunk) -> int:
        """Return the address of a chunk's first byte, where its home views begin."""
        allocation = self._allocation(chunk)
        return allocation.home.address(allocation.region)

    def host_view(self, chunk: Chunk, dtype: torch.dtype, numel: int, *, shadow: bool = False) -> torch.Tensor:
        """View a chunk's home, or its shadow copy, as a flat CPU tensor, for the host to read and write.

        The caller orders its reads and writes: see `ChunkSlots.await_home`.
        """
        allocation = self._shadow_copies[chunk] if shadow else self._touched(chunk)
        return allocation.home.bytes(allocation.region)[: numel * dtype.itemsize].view(dtype)

    def reader(self, chunk: Chunk, offset_nbytes: int, buffer: torch.Tensor) -> Callable[[], None]:
        """Make a job that fills `buffer` with a chunk's bytes from `offset_nbytes`."""
        allocation = self._allocation(chunk)
        job = Launch if allocation.home.only_launches(allocation.region) else partial
        return job(allocation.home.read, allocation.region, offset_nbytes, buffer)

    def only_launches(self, chunk: Chunk) -> bool:
        """Whether copies from and to a chunk only need launching (see `Launch`)."""
        allocation = self._allocation(chunk)
        return allocation.home.only_launches(allocation.region)

    def caster(self, chunk: Chunk, dtype: torch.dtype, buffer: torch.Tensor) -> Callable[[], None]:
        """Make a job that fills `buffer` with a chunk's elements, which are of `dtype`, cast to the buffer's dtype."""
        allocation = self._allocation(chunk)
        return partial(allocation.home.read_cast, allocation.region, dtype, buffer)

    def writer(
        self, chunk: Chunk, offset_nbytes: int, buffer: torch.Tensor, *, shadow: bool = False
    ) -> Callable[[], None]:
        """Make a job that writes `buffer` into a chunk, or its shadow copy, from `offset_nbytes`."""
        allocation = self._shadow_copies[chunk] if shadow else self._touched(chunk)
        job = Launch if allocation.home.only_launches(allocation.region) else partial
        return job(allocation.home.write, allocation.region, offset_nbytes, buffer)

    def _touched(self, chunk: Chunk) -> _Allocation:
        """Return a chunk's allocation to a caller that may write it: the chunk counts as touched."""
        allocation = self._allocation(chunk)
        if chunk in self._untouched:
            self._untouched.discard(chunk)
            self._used_nbytes += allocation.region.nbytes
        return allocation

    def _allocation(self, chunk: Chunk) -> _Allocation:
        """Return a chunk's allocation; allocate a promised chunk now."""
        if chunk not in self._allocations:
            self.keep_promises((chunk,))
        return self._allocations[chunk]


def _free(allocations: Iterable[_Allocation]) -> None:
    for allocation in allocations:
        allocation.home.free(allocation.region)
