"""Values that a forward saves and that are absent until its backward reads them: at home, or dropped.

What autograd holds meanwhile are stand-ins: tensors of the values' shapes over a few bytes that are not on the compute
tier. They keep the copies at home, and what the backward reads to make dropped values again. When the last of them is
gone (the backward has run, or the graph was dropped), the room at home is free for the next forward.

A stand-in is known by its dtype, which no value that leaves has, and found by what its bytes say. So a copy of one, as
hooks on saved tensors make, is recognised; if all that it was copied from is gone, so are the values.
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
"""The dtype of what stands for values at home."""


@dataclass(frozen=True)
class _Form:
    """How a value lies in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(value: torch.Tensor) -> _Form:
        return _Form(tuple(value.size()), tuple(value.stride()), int(value.storage_offset()), value.dtype)

    def over(self, buffer: torch.Tensor) -> torch.Tensor:
        """The value in a storage that begins with `buffer`; not a view of it for autograd."""
        empty = torch.empty(0, dtype=self.dtype, device=buffer.device)
        return empty.set_(buffer.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Forms:
    """How saved values lie in their one storage, of so many bytes."""

    values: tuple[_Form, ...]
    nbytes: int

    @staticmethod
    def of(values: Sequence[torch.Tensor]) -> _Forms:
        storage = values[0].untyped_storage()
        if any(value.untyped_storage().data_ptr() != storage.data_ptr() for value in values):
            raise AssertionError("saved values do not lie in one storage")
        return _Forms(tuple(map(_Form.of, values)), storage.nbytes())


def _version(value: object) -> int:
    """How often a tensor was changed in place; of an inference tensor, or of what is none, nobody counts."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


class SavedRoom:
    """Regions at home for saved storages. One that is given back is taken again by a storage of the same size.

    What is kept for that never makes more, with what is in use, than was in use at once before.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._spare: deque[Region] = deque()
        self._returned: deque[Sequence[Region]] = deque()  # by the garbage collector, at any time, in any thread
        self._in_use_nbytes = self._most_nbytes = 0
        self._is_closed = False

    @property
    def nbytes(self) -> int:
        """Bytes at home, in use or kept for the next forward."""
        self._collect()
        return self._in_use_nbytes + sum(region.nbytes for region in self._spare)

    @property
    def in_use_nbytes(self) -> int:
        """Bytes of values that some backward may still read."""
        self._collect()
        return self._in_use_nbytes

    def take(self, nbytes: int) -> Region:
        """A region of that size; what is in it is anything.

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
        """Nobody reads these any more. May be called at any time, by any thread."""
        self._returned.append(regions)

    def writer(self, region: Region, source: Callable[[], torch.Tensor]) -> Callable[[], None]:
        """A job that copies home what `source` gives when the job runs."""
        return self._job(region, lambda: self._home.write(region, 0, source()))

    def reader(self, region: Region, buffer: torch.Tensor) -> Callable[[], None]:
        """A job that fills `buffer`."""
        return self._job(region, partial(self._home.read, region, 0, buffer))

    def close(self) -> None:
        """Give all back to the home, what is in use as soon as nobody reads it any more."""
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
        """Keep no more spare regions than so many bytes, the latest ones."""
        spare_nbytes = sum(region.nbytes for region in self._spare)
        while self._spare and spare_nbytes > most_nbytes:
            region = self._spare.popleft()
            spare_nbytes -= region.nbytes
            self._home.free(region)


@dataclass
class _Copy:
    """A storage at home."""

    region: Region


class _Bytes(bytearray):
    """What the stand-ins of a storage lie in; it keeps what the forward has left at home."""

    saved: SavedValues


_stand_in_buffers: weakref.WeakValueDictionary[int, _Bytes] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


@dataclass
class SavedValues:
    """What one forward has left for its backward, however often that runs.

    Attributes:
        absence: what is absent in between.
        under_way: copies that nobody has waited for yet.
    """

    room: SavedRoom
    activation_plan: ActivationPlan = KEEP_ALL
    under_way: dict[str, Mark] = field(default_factory=dict)
    _copies: dict[str, _Copy] = field(default_factory=dict)
    _forms: dict[str, _Forms] = field(default_factory=dict)
    _regions: list[Region] = field(default_factory=list)
    _kept: list[tuple[Any, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        weakref.finalize(self, self.room.give_back, self._regions).atexit = False

    def keep(self, outputs: list[Any], count: int) -> None:
        """Take over the last outputs of a forward: what its backward reads to make dropped values again."""
        for value in outputs[len(outputs) - count :]:
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                value = value.detach()  # what the user gets has a graph, which keeps this
            self._kept.append((value, _version(value)))
        del outputs[len(outputs) - count :]

    def take(self, *, again: bool) -> list[Any]:
        """What was kept, for a backward; with `again`, for another one, too.

        Raises:
            UnsupportedError: some of it was changed in place.
        """
        kept = self._kept
        if any(_version(value) != version for value, version in kept):
            raise UnsupportedError(
                "a parameter, an input or an output of the model was changed in place between its forward and its "
                "backward, which has to run a part of the forward again with what it was; change it after the "
                'backward, or use the option activations="keep" or "offload"'
            )
        if not again:
            self._kept = []
        return [value for value, _ in kept]

    def note(self, storage: str, values: Sequence[torch.Tensor]) -> None:
        """Note how values lie in their storage."""
        self._forms[storage] = _Forms.of(values)

    def writer(self, storage: str, nbytes: int, values: Callable[[], Sequence[torch.Tensor]]) -> Callable[[], None]:
        """A job that copies a storage home, given when it runs by the values that lie in it.

        Raises:
            HomeError: the home has no room.
        """
        region = self.room.take(nbytes)
        self._regions.append(region)
        self._copies[storage] = _Copy(region)
        return self.room.writer(region, partial(self._whole, storage, nbytes, values))

    def reader(self, storage: str, buffer: torch.Tensor) -> Callable[[], None]:
        """A job that fills `buffer` with a storage's bytes."""
        return self.room.reader(self._copies[storage].region, buffer)

    def values(self, storage: str, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The saved values of a storage, in one that has its bytes again: the one `buffer` lies in."""
        return [form.over(buffer) for form in self._forms[storage].values]

    def recomputed(self, storage: str, made: torch.Tensor) -> list[torch.Tensor]:
        """The saved values of a storage that a call has made again, `made` being one that lies in it."""
        if made.untyped_storage().nbytes() != self._forms[storage].nbytes:
            raise AssertionError(f"{storage} was made again with another number of bytes")
        return self.values(storage, made)

    def stand_ins(self, storage: str) -> list[torch.Tensor]:
        """What stands for them, in the forward: one element, as often as it takes."""
        number = next(_numbers)
        held = _Bytes(struct.pack("=dd", number, 0.0))
        held.saved = self
        _stand_in_buffers[number] = held
        base = torch.frombuffer(held, dtype=STAND_IN, count=1)
        return [base.as_strided(form.size, (0,) * len(form.size)) for form in self._forms[storage].values]

    def _whole(self, name: str, nbytes: int, values: Callable[[], Sequence[torch.Tensor]]) -> torch.Tensor:
        """All bytes of the one storage that values lie in; notes how they lie in it."""
        given = values()
        self.note(name, given)
        if self._forms[name].nbytes > nbytes:
            raise AssertionError(f"{name} has more than the {nbytes} bytes that were planned")
        storage = given[0].untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=given[0].device)
        return flat.set_(storage, 0, (storage.nbytes(),), (1,))

    def wait_out(self) -> None:
        """Block until no copy is under way, whatever became of it: a run has failed."""
        for mark in self.under_way.values():
            try:
                mark.wait()
            except ChunkcError:
                continue
        self.under_way.clear()


def saved_values(arguments: Iterable[object]) -> SavedValues | None:
    """What a backward's arguments stand for; None: all are values.

    Raises:
        UnsupportedError: it is gone.
    """
    first = next((a for a in arguments if isinstance(a, torch.Tensor) and a.dtype is STAND_IN), None)
    if first is None:
        return None
    number = int(first.as_strided((1,), (1,)).item().real)
    found = _stand_in_buffers.get(number)
    if found is None:
        raise UnsupportedError(
            "the forward's saved values are absent, and hooks on saved tensors have copied and "
            'dropped what autograd knows them by; use the option activations="keep"'
        )
    return found.saved
