"""Room for chunks on the home tier: which chunk has which region."""

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
    """Where a chunk's home is."""

    home: Home
    region: Region


@dataclass(frozen=True)
class PutAside:
    """What chunks have had as their homes (see `Arena.put_aside`)."""

    wanted: tuple[tuple[Chunk, int], ...]
    places: Mapping[Chunk, _Allocation]
    untouched: Set[Chunk] = frozenset()


@dataclass
class Arena:
    """The homes of all chunks of one model.

    Args:
        home: of parameters and gradients, and of all else unless there is a `state_home`.
        state_home: of optimizer states: their home views need not be on the device.
        launches_only: parameters and gradients are copied by launches alone, from pinned memory or from what is in the
            device's reach; room that needs a thread is refused.
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
        """Bytes of all room that there is."""
        return sum(place.region.nbytes for place in (*self._allocations.values(), *self._shadow_copies.values()))

    @property
    def used_nbytes(self) -> int:
        """Bytes of chunks that are not all zeros, as far as is known, and of second room: others take no RAM."""
        return self._used_nbytes + sum(place.region.nbytes for place in self._shadow_copies.values())

    def reserve(self, wanted: Mapping[Chunk, int]) -> None:
        """Room, all zeros, for chunks of the given bytes: for all of them or for none.

        Raises:
            HomeError: the home tier has no room, or none of the kind that it must be.
        """
        places = self._allocate(wanted)
        self._allocations.update(places)
        self._untouched.update(places)
        for chunk in places:
            self._promised.pop(chunk, None)

    def promise(self, wanted: Mapping[Chunk, int]) -> None:
        """Room, all zeros, for chunks of the given bytes, once somebody reads or writes them. Takes none until then."""
        self._promised.update(wanted)

    def is_promised(self, chunk: Chunk) -> bool:
        """Whether a chunk has no room yet."""
        return chunk in self._promised

    def keep_promises(self, chunks: Iterable[Chunk]) -> None:
        """Room now for those of the chunks that have none yet.

        Raises:
            HomeError: as `reserve`.
        """
        if wanted := {chunk: self._promised[chunk] for chunk in chunks if chunk in self._promised}:
            self.reserve(wanted)

    def reserve_shadow_copies(self, wanted: Mapping[Chunk, int]) -> None:
        """Second room for chunks, for all of them or for none: what is written there is at home once they `swap`.

        Raises:
            HomeError: as `reserve`.
        """
        self._shadow_copies.update(self._allocate(wanted))

    def _allocate(self, wanted: Mapping[Chunk, int]) -> dict[Chunk, _Allocation]:
        places: dict[Chunk, _Allocation] = {}
        try:
            for chunk, nbytes in wanted.items():
                home = self._home_of(chunk.kind)
                place = places[chunk] = _Allocation(home, home.allocate(nbytes))
                is_launched = home.is_in_reach or home.only_launches(place.region)
                if self.launches_only and not is_state(chunk.kind) and not is_launched:
                    raise HomeError(
                        f"{chunk} of a distributed model is gathered from pinned memory, and this host's could not be "
                        "pinned: raise the limit of lockable memory (`ulimit -l`)"
                    )
        except BaseException:
            _free(places.values())
            raise
        return places

    def has_shadow_copy(self, chunk: Chunk) -> bool:
        """Whether a chunk has second room."""
        return chunk in self._shadow_copies

    def swap(self, chunk: Chunk) -> None:
        """Make a chunk's second room its home, and its home the second. Views stay with the bytes that they are of."""
        self._allocations[chunk], self._shadow_copies[chunk] = self._shadow_copies[chunk], self._touched(chunk)

    def is_zero(self, chunk: Chunk) -> bool:
        """Whether a chunk is all zeros still, since nobody has been given a way to write it."""
        return chunk in self._untouched or chunk in self._promised

    def forget(self, chunk: Chunk) -> None:
        """Let go of a chunk's bytes, of which nobody has views: it is all zeros then, and takes no memory in RAM.

        A home that cannot do that leaves them as they are.
        """
        if chunk in self._promised:
            return
        place = self._allocations[chunk]
        if chunk not in self._untouched and place.home.forget(place.region):
            self._untouched.add(chunk)
            self._used_nbytes -= place.region.nbytes

    def _home_of(self, kind: str) -> Home:
        return (self.state_home or self.home) if is_state(kind) else self.home

    def free(self, chunks: Iterable[Chunk]) -> None:
        """Give room back, as soon as nobody has views of it."""
        chunks = [chunk for chunk in chunks if self._promised.pop(chunk, None) is None]
        for chunk in chunks:
            place = self._touched(chunk)
            self._used_nbytes -= place.region.nbytes
        _free([self._allocations.pop(chunk) for chunk in chunks])
        _free([self._shadow_copies.pop(chunk) for chunk in chunks if chunk in self._shadow_copies])

    def replace(self, chunk: Chunk, nbytes: int) -> None:
        """Other room for a chunk, all zeros; the former goes with the last view of it.

        Raises:
            HomeError: the home tier has no room; the chunk is where it was.
        """
        former = self._touched(chunk)
        self.reserve({chunk: nbytes})
        self._used_nbytes -= former.region.nbytes
        former.home.free(former.region)

    def put_aside(self, wanted: Mapping[Chunk, int]) -> PutAside:
        """Let chunks of the given bytes have no room yet; what they have is kept for `put_back`."""
        aside = PutAside(tuple(wanted.items()), {c: self._allocations.pop(c) for c in wanted if c in self._allocations})
        self._promised.update({chunk: nbytes for chunk, nbytes in wanted.items() if chunk in aside.places})
        return replace(aside, untouched=self._untouched.intersection(aside.places))

    def put_back(self, aside: PutAside) -> None:
        """Undo `put_aside`: room that chunks have got since goes with the last view of it."""
        for chunk, nbytes in aside.wanted:
            place, is_known = aside.places.get(chunk), chunk in self
            self.free([chunk] if is_known else [])
            self._untouched.discard(chunk)
            if not is_known:  # it needs none any more
                if place is not None:
                    self._used_nbytes -= 0 if chunk in aside.untouched else place.region.nbytes
                    _free([place])
            elif place is not None:
                self._allocations[chunk] = place
                self._untouched.update(aside.untouched & {chunk})
            else:
                self._promised[chunk] = nbytes

    def is_shared_with_forks(self, kind: str) -> bool:
        """Whether a child of `os.fork` would share the bytes of chunks of this kind."""
        return self._home_of(kind).is_shared_with_forks

    def view(
        self, chunk: Chunk, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset_nbytes: int
    ) -> torch.Tensor:
        """A home view of a part of a chunk (see `Home.tensor`)."""
        place = self._touched(chunk)
        return place.home.tensor(place.region, dtype, shape, stride, offset_nbytes)

    def address(self, chunk: Chunk) -> int:
        """Where a chunk's home views begin: the address of its first byte."""
        place = self._allocation(chunk)
        return place.home.address(place.region)

    def host_view(self, chunk: Chunk, dtype: torch.dtype, numel: int, *, shadow: bool = False) -> torch.Tensor:
        """A chunk's elements at home, or in its second room, as a flat CPU tensor, for the host to read and write.

        Who uses it orders himself: see `ChunkStore.await_home`.
        """
        place = self._shadow_copies[chunk] if shadow else self._touched(chunk)
        return place.home.bytes(place.region)[: numel * dtype.itemsize].view(dtype)

    def reader(self, chunk: Chunk, offset_nbytes: int, buffer: torch.Tensor) -> Callable[[], None]:
        """A job that fills `buffer` with a chunk's bytes from `offset_nbytes`."""
        place = self._allocation(chunk)
        job = Launch if place.home.only_launches(place.region) else partial
        return job(place.home.read, place.region, offset_nbytes, buffer)

    def only_launches(self, chunk: Chunk) -> bool:
        """Whether copies from and to a chunk have only to be launched (see `Launch`)."""
        place = self._allocation(chunk)
        return place.home.only_launches(place.region)

    def caster(self, chunk: Chunk, dtype: torch.dtype, buffer: torch.Tensor) -> Callable[[], None]:
        """A job that fills `buffer` with a chunk's elements, which are of `dtype`, cast to its own."""
        place = self._allocation(chunk)
        return partial(place.home.read_cast, place.region, dtype, buffer)

    def writer(
        self, chunk: Chunk, offset_nbytes: int, buffer: torch.Tensor, *, shadow: bool = False
    ) -> Callable[[], None]:
        """A job that writes `buffer` into a chunk, or its second room, from `offset_nbytes`."""
        place = self._shadow_copies[chunk] if shadow else self._touched(chunk)
        job = Launch if place.home.only_launches(place.region) else partial
        return job(place.home.write, place.region, offset_nbytes, buffer)

    def _touched(self, chunk: Chunk) -> _Allocation:
        """Where a chunk is, for somebody who may write it."""
        place = self._allocation(chunk)
        if chunk in self._untouched:
            self._untouched.discard(chunk)
            self._used_nbytes += place.region.nbytes
        return place

    def _allocation(self, chunk: Chunk) -> _Allocation:
        """Where a chunk is, which has room from now on."""
        self.keep_promises((chunk,))
        return self._allocations[chunk]


def _free(places: Iterable[_Allocation]) -> None:
    for place in places:
        place.home.free(place.region)
