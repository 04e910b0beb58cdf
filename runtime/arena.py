"""Room for chunks on the home tier: which chunk lies where in which region."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from chunkc.runtime.homes import Home, Region

MAX_REGIONS_PER_CALL = 16
"""Chunks share regions: each region of a disk home takes two file descriptors."""


@dataclass(frozen=True)
class _Place:
    """Where a chunk's home is."""

    region: Region
    offset_nbytes: int
    nbytes: int


@dataclass
class Arena:
    """The homes of all chunks of one model, in one `Home`."""

    home: Home
    _places: dict[str, _Place] = field(default_factory=dict)

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
        enough = -(-sum(wanted.values()) // MAX_REGIONS_PER_CALL)
        batches: list[list[str]] = []
        room = 0
        for chunk, nbytes in wanted.items():
            if not batches or room >= enough:
                batches.append([])
                room = 0
            batches[-1].append(chunk)
            room += nbytes
        places: dict[str, _Place] = {}
        regions: list[Region] = []
        try:
            for batch in batches:
                regions.append(self.home.allocate(sum(wanted[chunk] for chunk in batch)))
                offset_nbytes = 0
                for chunk in batch:
                    places[chunk] = _Place(regions[-1], offset_nbytes, wanted[chunk])
                    offset_nbytes += wanted[chunk]
        except BaseException:
            for region in regions:
                self.home.free(region)
            raise
        self._places.update(places)

    def free(self, chunks: Iterable[str]) -> None:
        """Give room back; a region goes when no chunk is left in it."""
        regions = {self._places.pop(chunk).region for chunk in chunks}
        for region in regions - {place.region for place in self._places.values()}:
            self.home.free(region)

    def view(
        self, chunk: str, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset_nbytes: int
    ) -> torch.Tensor:
        """A home view of a part of a chunk (see `Home.tensor`)."""
        place = self._places[chunk]
        return self.home.tensor(place.region, dtype, shape, stride, place.offset_nbytes + offset_nbytes)

    def reader(self, chunk: str, offset_nbytes: int, buffer: torch.Tensor) -> Callable[[], None]:
        """A job that fills `buffer` with a chunk's bytes from `offset_nbytes`."""
        place, read = self._places[chunk], self.home.read
        return lambda: read(place.region, place.offset_nbytes + offset_nbytes, buffer)

    def writer(self, chunk: str, offset_nbytes: int, buffer: torch.Tensor) -> Callable[[], None]:
        """A job that writes `buffer` into a chunk from `offset_nbytes`."""
        place, write = self._places[chunk], self.home.write
        return lambda: write(place.region, place.offset_nbytes + offset_nbytes, buffer)
