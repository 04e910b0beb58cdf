"""Room for chunks on the home tier: which chunk lies where in which region."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from chunkc.ir.chunks import is_state, split_chunk_name
from chunkc.runtime.homes import Home, Region

MAX_REGIONS_PER_CALL = 16
"""Chunks share regions where the home allows it: each region of a disk home takes two file descriptors."""


class Launch(partial[None]):
    """A copy that has only to be launched: the call returns at once, and the current CUDA stream does the rest.

    Every other job blocks the thread it runs on until the copy is done.
    """


@dataclass(frozen=True)
class _Place:
    """Where a chunk's home is."""

    home: Home
    region: Region
    offset_nbytes: int
    nbytes: int


@dataclass
class Arena:
    """The homes of all chunks of one model.

    Args:
        home: of parameters and gradients, and of all else unless there is a `state_home`.
        state_home: of optimizer states: their home views need not be on the device.
    """

    home: Home
    state_home: Home | None = None
    _places: dict[str, _Place] = field(default_factory=dict)
    _untouched: set[str] = field(default_factory=set)

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._places

    @property
    def chunks(self) -> tuple[str, ...]:
        return tuple(self._places)

    @property
    def nbytes(self) -> int:
        return sum(place.nbytes for place in self._places.values())

    def reserve(self, wanted: Mapping[str, int]) -> None:
        """Room, all zeros, for chunks of the given bytes: for all of them or for none.

        Raises:
            HomeError: the home tier has no room.
        """
        places: dict[str, _Place] = {}
        try:
            for home, batch in self._batches(wanted):
                region = home.allocate(sum(wanted[chunk] for chunk in batch))
                offset_nbytes = 0
                for chunk in batch:
                    places[chunk] = _Place(home, region, offset_nbytes, wanted[chunk])
                    offset_nbytes += wanted[chunk]
        except BaseException:
            _free(places.values())
            raise
        self._places.update(places)
        self._untouched.update(places)

    def is_zero(self, chunk: str) -> bool:
        """Whether a chunk is all zeros still, since nobody has been given a way to write it."""
        return chunk in self._untouched

    def _batches(self, wanted: Mapping[str, int]) -> list[tuple[Home, list[str]]]:
        """Chunks that are to share a region, with its home."""
        by_home: dict[Home, list[str]] = {}
        for chunk in wanted:
            home = self.state_home if is_state(split_chunk_name(chunk)[0]) else None
            by_home.setdefault(home or self.home, []).append(chunk)
        batches: list[tuple[Home, list[str]]] = []
        for home, chunks in by_home.items():
            enough = -(-sum(wanted[chunk] for chunk in chunks) // MAX_REGIONS_PER_CALL) if home.shares_regions else 0
            room: int | None = None
            for chunk in chunks:
                if room is None or room >= enough:
                    batches.append((home, []))
                    room = 0
                batches[-1][1].append(chunk)
                room += wanted[chunk]
        return batches

    def free(self, chunks: Iterable[str]) -> None:
        """Give room back; a region goes when no chunk is left in it."""
        chunks = list(chunks)
        left = [self._places.pop(chunk) for chunk in chunks]
        self._untouched.difference_update(chunks)
        in_use = {(place.home, place.region) for place in self._places.values()}
        _free([place for place in left if (place.home, place.region) not in in_use])

    def replace(self, chunk: str, nbytes: int) -> None:
        """Other room for a chunk, all zeros; the former goes with the last view of it.

        Raises:
            HomeError: the home tier has no room; the chunk is where it was.
        """
        former = self._places.pop(chunk)
        try:
            self.reserve({chunk: nbytes})
        except BaseException:
            self._places[chunk] = former
            raise
        if all((p.home, p.region) != (former.home, former.region) for p in self._places.values()):
            former.home.free(former.region)

    def is_shared_with_forks(self, kind: str) -> bool:
        """Whether a child of `os.fork` would share the bytes of chunks of this kind."""
        return (self.state_home or self.home if is_state(kind) else self.home).is_shared_with_forks

    def view(
        self, chunk: str, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset_nbytes: int
    ) -> torch.Tensor:
        """A home view of a part of a chunk (see `Home.tensor`)."""
        place = self._touched(chunk)
        return place.home.tensor(place.region, dtype, shape, stride, place.offset_nbytes + offset_nbytes)

    def host_view(self, chunk: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """A chunk's elements at home as a flat CPU tensor, for the host to read and write.

        Who uses it orders himself: see `ChunkStore.await_home`.
        """
        place = self._touched(chunk)
        end_nbytes = place.offset_nbytes + numel * dtype.itemsize
        return place.home.bytes(place.region)[place.offset_nbytes : end_nbytes].view(dtype)

    def reader(self, chunk: str, offset_nbytes: int, buffer: torch.Tensor) -> Callable[[], None]:
        """A job that fills `buffer` with a chunk's bytes from `offset_nbytes`."""
        place = self._places[chunk]
        job = Launch if place.home.only_launches(place.region) else partial
        return job(place.home.read, place.region, place.offset_nbytes + offset_nbytes, buffer)

    def writer(self, chunk: str, offset_nbytes: int, buffer: torch.Tensor) -> Callable[[], None]:
        """A job that writes `buffer` into a chunk from `offset_nbytes`."""
        place = self._touched(chunk)
        job = Launch if place.home.only_launches(place.region) else partial
        return job(place.home.write, place.region, place.offset_nbytes + offset_nbytes, buffer)

    def _touched(self, chunk: str) -> _Place:
        """Where a chunk is, for somebody who may write it."""
        self._untouched.discard(chunk)
        return self._places[chunk]


def _free(places: Iterable[_Place]) -> None:
    for home, region in {(place.home, place.region) for place in places}:
        home.free(region)
