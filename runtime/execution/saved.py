"""Keep saved values that are offloaded, or dropped and recomputed, from a forward until its backward.

Meanwhile autograd holds stand-ins: tensors of the values' shapes over a few bytes that are not on the compute tier.
They keep alive the copies at home, and the tensors from which the backward recomputes dropped values. When the last
stand-in is gone (the backward has run, or the graph was dropped), the home memory is free for the next forward.

A stand-in is recognised by its dtype, which no such value has, and found by the number in its bytes. So a copy of a
stand-in, as hooks on saved tensors make, is recognised; if the stand-ins that it was copied from are gone, so are the
values.
"""

from __future__ import annotations

import itertools
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from chunkc.ir.errors import ChunkcError, UnsupportedError
from chunkc.ir.items import KEEP_ALL, ActivationPlan
from chunkc.runtime.device.streams import Launch
from chunkc.runtime.device.tier import Mark
from chunkc.runtime.storage.homes import Home, Region

STAND_IN = torch.complex128
"""Dtype of stand-ins."""


@dataclass(frozen=True)
class _Geometry:
    """Size, strides, offset and dtype of a value in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(value: torch.Tensor) -> _Geometry:
        return _Geometry(tuple(value.size()), tuple(value.stride()), int(value.storage_offset()), value.dtype)

    def over(self, buffer: torch.Tensor) -> torch.Tensor:
        """Make the value in the storage of `buffer`; for autograd it is no view of `buffer`."""
        empty = torch.empty(0, dtype=self.dtype, device=buffer.device)
        return empty.set_(buffer.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _StorageGeometry:
    """Geometry of the saved values of one storage, and its size."""

    values: tuple[_Geometry, ...]
    nbytes: int

    @staticmethod
    def of(values: Sequence[torch.Tensor]) -> _StorageGeometry:
        storage = values[0].untyped_storage()
        if any(value.untyped_storage().data_ptr() != storage.data_ptr() for value in values):
            raise AssertionError("saved values do not lie in one storage")
        return _StorageGeometry(tuple(map(_Geometry.of, values)), storage.nbytes())


def _version(value: object) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors, which have no count, and non-tensors."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


class SavedRoom:
    """Pool of regions at home for saved storages. A returned region is reused by a storage of the same size.

    Regions in use and spare ones never take more bytes together than were once in use at the same time.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._spare: deque[Region] = deque()
        self._returned: deque[Sequence[Region]] = deque()  # by the garbage collector, at any time, in any thread
        self._in_use_nbytes = self._most_nbytes = 0
        self._is_closed = False

    @property
    def nbytes(self) -> int:
        """Bytes at home, in use or spare."""
        self._collect()
        return self._in_use_nbytes + sum(region.nbytes for region in self._spare)

    @property
    def in_use_nbytes(self) -> int:
        """Bytes of values that a backward may still read."""
        self._collect()
        return self._in_use_nbytes

    def take(self, nbytes: int) -> Region:
        """Take a region of that size; its contents are undefined.

        Raises:
            HomeError: the home has no room.
        """
        self._collect()
        region = next((region for region in self._spare if region.nbytes == nbytes), None)
        if region is None:
            self._trim(max(0, self._most_nbytes - self._in_use_nbytes - nbytes))
            region = self._home.allocate(nbytes)
        else:
            self._spare.remove(region)
        self._in_use_nbytes += nbytes
        self._most_nbytes = max(self._most_nbytes, self._in_use_nbytes)
        return region

    def give_back(self, regions: Sequence[Region]) -> None:
        """Return regions that no backward will read. May be called at any time, by any thread."""
        self._returned.append(regions)

    def writer(self, region: Region, source: Callable[[], torch.Tensor]) -> Callable[[], None]:
        """Make a job that copies a tensor home: the result of `source`, called when the job runs."""
        return self._job(region, lambda: self._home.write(region, 0, source()))

    def reader(self, region: Region, buffer: torch.Tensor) -> Callable[[], None]:
        """Make a job that fills `buffer` from home."""
        return self._job(region, partial(self._home.read, region, 0, buffer))

    def close(self) -> None:
        """Free all regions, those in use as soon as they are given back."""
        self._is_closed = True
        self._trim(0)
        self._collect()

    def _job(self, region: Region, copy: Callable[[], None]) -> Callable[[], None]:
        return Launch(copy) if self._home.only_launches(region) else copy

    def _collect(self) -> None:
        while self._returned:
            for region in self._returned.popleft():
                self._in_use_nbytes -= region.nbytes
                self._spare.append(region)
        if self._is_closed:
            self._trim(0)

    def _trim(self, most_nbytes: int) -> None:
        """Free the oldest spare regions until the rest takes at most `most_nbytes`."""
        spare_nbytes = sum(region.nbytes for region in self._spare)
        while self._spare and spare_nbytes > most_nbytes:
            region = self._spare.popleft()
            spare_nbytes -= region.nbytes
            self._home.free(region)


class _StandInBuffer(bytearray):
    """Memory of a storage's stand-ins; keeps the forward's saved values alive."""

    saved: SavedValues


_stand_in_buffers: weakref.WeakValueDictionary[int, _StandInBuffer] = weakref.WeakValueDictionary()
"""Memory of stand-ins by the number in its bytes."""
_numbers = itertools.count(1)


@dataclass
class SavedValues:
    """Values that one forward has saved for its backward, which may run more than once.

    Attributes:
        activation_plan: which values are offloaded or recomputed.
        under_way: copies that have not been waited for, by storage.
    """

    room: SavedRoom
    activation_plan: ActivationPlan = KEEP_ALL
    under_way: dict[str, Mark] = field(default_factory=dict)
    _region_of: dict[str, Region] = field(default_factory=dict)
    _geometry: dict[str, _StorageGeometry] = field(default_factory=dict)
    _regions: list[Region] = field(default_factory=list)  # those of `_region_of`, for the finalizer, which gets no self
    _kept: list[tuple[Any, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        weakref.finalize(self, self.room.give_back, self._regions).atexit = False

    def keep(self, outputs: list[Any], count: int) -> None:
        """Take over the last outputs of a forward: the inputs from which its backward recomputes dropped values."""
        for value in outputs[len(outputs) - count :]:
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                value = value.detach()  # the user's tensor has a graph that keeps this object: no reference cycle
            self._kept.append((value, _version(value)))
        del outputs[len(outputs) - count :]

    def take(self, *, again: bool) -> list[Any]:
        """Return the kept values for a backward; with `again`, keep them for another backward.

        Raises:
            UnsupportedError: one was changed in place.
        """
        kept = self._kept
        if any(_version(value) != version for value, version in kept):
            raise UnsupportedError(
                "a parameter, an input or an output of the model was changed in place between its forward and its "
                "backward, which recomputes a part of the forward from its old value; change it after the "
                'backward, or use the option activations="keep" or "offload"'
            )
        if not again:
            self._kept = []
        return [value for value, _ in kept]

    def is_copied(self, storage: str) -> bool:
        """Whether a copy of the storage home has begun."""
        return storage in self._region_of

    def note(self, storage: str, values: Sequence[torch.Tensor]) -> None:
        """Note the geometry of values in their storage."""
        self._geometry[storage] = _StorageGeometry.of(values)

    def writer(self, storage: str, nbytes: int, values: Callable[[], Sequence[torch.Tensor]]) -> Callable[[], None]:
        """Make a job that copies a storage home.

        Args:
            values: returns the values that lie in the storage, when the job runs.

        Raises:
            HomeError: the home has no room.
        """
        region = self.room.take(nbytes)
        self._regions.append(region)
        self._region_of[storage] = region
        return self.room.writer(region, partial(self._storage_bytes, storage, nbytes, values))

    def reader(self, storage: str, buffer: torch.Tensor) -> Callable[[], None]:
        """Make a job that fills `buffer` with a storage's bytes."""
        return self.room.reader(self._region_of[storage], buffer)

    def values(self, storage: str, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Make the saved values of a storage over the storage of `buffer`, which has the same bytes."""
        return [geometry.over(buffer) for geometry in self._geometry[storage].values]

    def recomputed(self, storage: str, value: torch.Tensor) -> list[torch.Tensor]:
        """Make the saved values of a storage that a call has recomputed; `value` lies in the new one."""
        if value.untyped_storage().nbytes() != self._geometry[storage].nbytes:
            raise AssertionError(f"{storage} was recomputed with another number of bytes")
        return self.values(storage, value)

    def stand_ins(self, storage: str) -> list[torch.Tensor]:
        """Make a forward's stand-ins for the values of a storage: one element, expanded to each value's size."""
        number = next(_numbers)
        buffer = _StandInBuffer(struct.pack("=dd", number, 0.0))
        buffer.saved = self
        _stand_in_buffers[number] = buffer
        base = torch.frombuffer(buffer, dtype=STAND_IN, count=1)
        return [base.as_strided(value.size, (0,) * len(value.size)) for value in self._geometry[storage].values]

    def _storage_bytes(self, name: str, nbytes: int, get_values: Callable[[], Sequence[torch.Tensor]]) -> torch.Tensor:
        """View all bytes of the one storage that values lie in; note their geometry."""
        values = get_values()
        self.note(name, values)
        if self._geometry[name].nbytes > nbytes:
            raise AssertionError(f"{name} has more than the {nbytes} bytes that were planned")
        storage = values[0].untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=values[0].device)
        return flat.set_(storage, 0, (storage.nbytes(),), (1,))

    def wait_out(self) -> None:
        """Block until no copy is under way, ignoring errors: the run has failed already."""
        for mark in self.under_way.values():
            try:
                mark.wait()
            except ChunkcError:
                continue
        self.under_way.clear()


def saved_values(arguments: Iterable[object]) -> SavedValues | None:
    """Find the saved values behind stand-ins among a backward's arguments; None: no argument is a stand-in.

    Raises:
        UnsupportedError: the saved values are gone.
    """
    first = next((a for a in arguments if isinstance(a, torch.Tensor) and a.dtype is STAND_IN), None)
    if first is None:
        return None
    number = int(first.as_strided((1,), (1,)).item().real)
    buffer = _stand_in_buffers.get(number)
    if buffer is None:
        raise UnsupportedError(
            "the forward's saved values are gone: hooks on saved tensors have copied and dropped the tensors that "
            'stand for them in autograd\'s graph; use the option activations="keep", or under "auto" a larger '
            "memory_budget: hooks get the values themselves where all are kept"
        )
    return buffer.saved
