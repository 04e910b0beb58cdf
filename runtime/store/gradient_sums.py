"""Sum up squares of gradients in their slots, for norms: no gradient crosses a link again for its norm.

Tables and sums lie at home, so that they take no room on the compute tier: the kernel writes a number for each 65,536
elements there. A sum is valid if `.grad` is unchanged when the sum is read, not when it was computed.
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
"""Orders the computation of a gradient's sums and a caller's reading of the optimizer's parameters."""


@dataclass(frozen=True)
class _Room:
    """Home memory of a group's table of rows and of their sums, and each parameter's rows."""

    slices: tuple[TensorSlice, ...]
    rows: torch.Tensor
    sums: torch.Tensor
    rows_of: Mapping[str, slice]

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
class _Sums:
    """Sums of a parameter's gradient: with the home view in `.grad`, its version, and the time by `clock`."""

    gradient: weakref.ref[torch.Tensor]
    version: int
    at: int
    sums: torch.Tensor


@dataclass
class GradientSums:
    """Sums of squares of one model's gradients.

    Args:
        home: for tables and sums.

    Attributes:
        requesters: objects that need norms, each with its kernel; sums are computed as long as there is one.
        written: how often a group's gradients were written home.
        read_nbytes: bytes of gradients at home that were read for a norm since they had no valid sum.
    """

    home: Home
    requesters: weakref.WeakKeyDictionary[object, SumSquares] = field(default_factory=weakref.WeakKeyDictionary)
    written: Counter[int] = field(default_factory=Counter)
    read_nbytes: int = 0
    _rooms: dict[int, _Room] = field(default_factory=dict)
    _computed: dict[str, _Sums] = field(default_factory=dict)
    _is_logged: bool = False

    @contextmanager
    def without_requests(self) -> Iterator[None]:
        """Inside, compute no sums for gradients that go home; afterwards restore requesters and sums."""
        requesters, written, computed = self.requesters, self.written.copy(), dict(self._computed)
        self.requesters = weakref.WeakKeyDictionary()
        try:
            yield
        finally:
            self.requesters, self.written, self._computed = requesters, written, computed

    def forget(self, group: ChunkGroup) -> None:
        """Note that a group's gradients go home without sums; earlier sums become invalid."""
        self.written[group.index] += 1
        for tensor_slice in group.slices:
            self._computed.pop(tensor_slice.spec.name, None)

    def take(self, group: ChunkGroup, slot: torch.Tensor, gradients: Mapping[str, torch.Tensor], tier: Tier) -> None:
        """Compute the sums of a group's gradients, which are complete in their slot and about to go home.

        Args:
            gradients: the home views in `.grad`, by parameter.
        """
        self.forget(group)
        sum_squares = next(iter(self.requesters.values()), None)
        if sum_squares is None or group.is_cut:  # the slot has this rank's terms only: ranks add up on the way home
            return
        if (room := self._room(group)) is None:
            return
        tier.enqueue(sum_squares, slot, room.rows, room.sums)
        for name, gradient in gradients.items():
            sums = room.sums[room.rows_of[name]]
            self._computed[name] = _Sums(weakref.ref(gradient), gradient._version, next(clock), sums)

    def _room(self, group: ChunkGroup) -> _Room | None:
        """Return the group's memory, allocated if need be; None where home has no room, which is logged once."""
        room = self._rooms.get(group.index)
        if room is None or room.slices != group.slices:
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
        """Return the sums of a parameter's gradient, `[num_rows]` fp64; None if it may have changed since.

        Args:
            since: by `clock`; older sums are invalid.
        """
        computed = self._computed.get(name)
        if computed is None or computed.gradient() is not gradient:
            return None
        is_valid = computed.version == gradient._version and computed.at > since
        return computed.sums if is_valid else None


def request_sums(requester: object, of: Iterable[GradientSums], sum_squares: SumSquares) -> None:
    """Compute sums from now on, as long as the requester lives."""
    for sums in of:
        sums.requesters.setdefault(requester, sum_squares)
