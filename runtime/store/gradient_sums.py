"""Sums of squares of gradients, taken in their slots, for whoever asks for their norm: nothing crosses a link for it.

Tables and sums lie at home, so that they take no room on the compute tier: the kernel writes a number for each 65,536
elements there. Whether a sum is still true of a gradient is asked when it is read: of `.grad` as it is by then.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from chunkc.ir.errors import HomeError
from chunkc.ir.layout import ChunkGroup, TensorSlice
from chunkc.ir.sums import COLUMNS, SumSquares, num_rows, rows_of
from chunkc.runtime.device.tier import Tier
from chunkc.runtime.storage.homes import Home

logger = logging.getLogger(__name__)

_INT64_NBYTES = 8

clock = itertools.count(1)
"""Tells what came first: a gradient's sums, or a look at the optimizer's parameters."""


@dataclass(frozen=True)
class _Room:
    """A group's table of rows, their sums, and which of them are each parameter's; at home."""

    slices: tuple[TensorSlice, ...]
    rows: torch.Tensor
    sums: torch.Tensor
    places: Mapping[str, slice]

    @staticmethod
    def of(group: ChunkGroup, home: Home) -> _Room:
        table = rows_of([(s.offset, s.spec.numel) for s in group.slices])
        region = home.allocate(table.nbytes + len(table) * _INT64_NBYTES)
        home.bytes(region)[: table.nbytes].view(torch.int64).numpy()[:] = table.reshape(-1)
        ends = list(itertools.accumulate(num_rows(s.spec.numel) for s in group.slices))
        return _Room(
            group.slices,
            home.tensor(region, torch.int64, table.shape, (COLUMNS, 1), 0),
            home.tensor(region, torch.float64, (len(table),), (1,), table.nbytes),
            {s.spec.name: slice(end - num_rows(s.spec.numel), end) for s, end in zip(group.slices, ends, strict=True)},
        )


@dataclass(frozen=True)
class _Taken:
    """Of what gradient a parameter's sums are: the home view that is `.grad`, as often written to, and when."""

    gradient: weakref.ref[torch.Tensor]
    version: int
    at: int
    sums: torch.Tensor


@dataclass
class GradientSums:
    """The sums of one model's gradients.

    Args:
        home: has room for them.

    Attributes:
        askers: who wants norms; sums are taken for as long as there is one.
        written: how often a group's gradients went home.
        read_nbytes: bytes of gradients at home that were read for a norm since no sum was true of them.
    """

    home: Home
    requesters: weakref.WeakKeyDictionary[object, SumSquares] = field(default_factory=weakref.WeakKeyDictionary)
    written: Counter[int] = field(default_factory=Counter)
    read_nbytes: int = 0
    _rooms: dict[int, _Room] = field(default_factory=dict)
    _taken: dict[str, _Taken] = field(default_factory=dict)
    _is_logged: bool = False

    @contextmanager
    def without_requests(self) -> Iterator[None]:
        """Inside, gradients that go home are none of those that anybody asks about; afterwards all is as before."""
        requesters, written, taken = self.requesters, self.written.copy(), dict(self._taken)
        self.requesters = weakref.WeakKeyDictionary()
        try:
            yield
        finally:
            self.requesters, self.written, self._taken = requesters, written, taken

    def forget(self, group: ChunkGroup) -> None:
        """The group's gradients go home, and nobody takes their sums."""
        self.written[group.index] += 1
        for tensor_slice in group.slices:
            self._taken.pop(tensor_slice.spec.name, None)

    def take(self, group: ChunkGroup, slot: torch.Tensor, gradients: Mapping[str, torch.Tensor], tier: Tier) -> None:
        """The group's gradients go home from their slot, where all of them lie as they are to be: compute their sums.

        Args:
            gradients: by parameter, the home views that are `.grad`.
        """
        self.forget(group)
        sum_squares = next(iter(self.requesters.values()), None)
        if sum_squares is None or group.is_cut:  # a rank's share of them: ranks add theirs up on the way
            return
        if (room := self._room(group)) is None:
            return
        tier.enqueue(sum_squares, slot, room.rows, room.sums)
        for name, gradient in gradients.items():
            sums = room.sums[room.places[name]]
            self._taken[name] = _Taken(weakref.ref(gradient), gradient._version, next(clock), sums)

    def _room(self, group: ChunkGroup) -> _Room | None:
        """The group's room; None where home has none: then gradients are read, which is logged once."""
        found = self._rooms.get(group.index)
        if found is None or found.slices != group.slices:
            self._rooms.pop(group.index, None)
            try:
                self._rooms[group.index] = _Room.of(group, self.home)
            except HomeError as error:
                if not self._is_logged:
                    self._is_logged = True
                    logger.info(
                        "home has no room for the sums of squares of %s's gradients: %s. So norms read such gradients "
                        "at home (report.gradients_read_nbytes); free some of it, or use another home",
                        group.title,
                        error,
                    )
        return self._rooms.get(group.index)

    def of(self, name: str, gradient: torch.Tensor, *, since: int) -> torch.Tensor | None:
        """The sums of a parameter's gradient, `[num_rows]` fp64; None: it may have changed since they were taken.

        Args:
            since: by `clock`; older sums do not count.
        """
        taken = self._taken.get(name)
        is_true = (
            taken is not None
            and taken.gradient() is gradient
            and taken.version == gradient._version
            and taken.at > since
        )
        return taken.sums if is_true and taken is not None else None


def request_sums(asker: object, of: Iterable[GradientSums], sum_squares: SumSquares) -> None:
    """From now on sums are taken for somebody."""
    for sums in of:
        sums.requesters.setdefault(asker, sum_squares)
