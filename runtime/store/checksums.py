"""Note what parameters and gradients contain when their staged update begins, and compare it with home before a commit.

A user may write home where no version counter sees it: through `.data`, an array, a kept view, a collective or a kernel
of another library. Checksums see every such write. Tables and sums lie at home, as those of norms do, so that they take
no room on the compute tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from chunkc.ir.layout import GRAD, PARAM, ChunkGroup, TensorSlice
from chunkc.ir.sums import COLUMNS, Checksum, rows_of
from chunkc.runtime.storage.homes import Home

KINDS = (PARAM, GRAD)
"""Kinds of data, both of one dtype, that an update reads and users may write between a backward and its step."""

_INT64_NBYTES = 8


@dataclass(frozen=True)
class ChecksumTable:
    """A group's table of rows, and the checksums of each kind of data: as noted, and now. All in one memory.

    Attributes:
        rows: int64 `[num_rows, COLUMNS]`, in words.
        noted, now: int64 `[num_rows]` by kind.
    """

    rows: torch.Tensor
    noted: Mapping[str, torch.Tensor]
    now: Mapping[str, torch.Tensor]

    @staticmethod
    def over(flat: torch.Tensor, num_rows: int) -> ChecksumTable:
        """Divide a flat int64 tensor into a table and its checksums."""
        rows, *sums = flat.split([num_rows * COLUMNS, *[num_rows] * 2 * len(KINDS)])
        noted, now = sums[: len(KINDS)], sums[len(KINDS) :]
        return ChecksumTable(
            rows.view(num_rows, COLUMNS), dict(zip(KINDS, noted, strict=True)), dict(zip(KINDS, now, strict=True))
        )

    def note(self, checksum: Checksum, data: Mapping[str, torch.Tensor]) -> None:
        """Compute the checksums of flat data, by kind, and note them."""
        for kind in KINDS:
            checksum(words_of(data[kind]), self.rows, self.noted[kind])

    def compute(self, checksum: Checksum, data: Mapping[str, torch.Tensor]) -> None:
        """Compute the checksums of flat data, by kind, to compare them with those that were noted."""
        for kind in KINDS:
            checksum(words_of(data[kind]), self.rows, self.now[kind])

    @property
    def is_unchanged(self) -> bool:
        """Whether the checksums are those that were noted; of a table that the host reads."""
        return all(torch.equal(self.noted[kind], self.now[kind]) for kind in KINDS)


def words_of(data: torch.Tensor) -> torch.Tensor:
    """View flat data as the words that checksums are of."""
    return data.detach().view(torch.int16 if data.dtype.itemsize == 2 else torch.int32)


@dataclass(frozen=True)
class _Tables:
    """A group's table for the compute tier, and the same memory for the host."""

    slices: tuple[TensorSlice, ...]
    on_tier: ChecksumTable
    on_host: ChecksumTable

    @staticmethod
    def of(group: ChunkGroup, home: Home) -> _Tables:
        words = -(-group.dtype.itemsize // 4)  # per element
        table = rows_of([(s.offset * words, s.spec.numel * words) for s in group.slices])
        numel = len(table) * (COLUMNS + 2 * len(KINDS))
        region = home.allocate(numel * _INT64_NBYTES)
        on_host = ChecksumTable.over(home.bytes(region).view(torch.int64)[:numel], len(table))
        on_host.rows.numpy()[:] = table
        on_tier = ChecksumTable.over(home.tensor(region, torch.int64, (numel,), (1,), 0), len(table))
        return _Tables(group.slices, on_tier, on_host)


class Checksums:
    """Checksum tables of one model's groups.

    Args:
        home: for the tables.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._tables: dict[int, _Tables] = {}

    def reserve(self, groups: Iterable[ChunkGroup]) -> None:
        """Allocate the tables of these groups.

        Raises:
            HomeError: the home tier has no room.
        """
        for group in groups:
            tables = self._tables.get(group.index)
            if tables is None or tables.slices != group.slices:
                self._tables[group.index] = _Tables.of(group, self._home)

    def has(self, group: ChunkGroup) -> bool:
        """Whether a group has tables, of its present slices."""
        tables = self._tables.get(group.index)
        return tables is not None and tables.slices == group.slices

    def on_tier(self, group: int) -> ChecksumTable:
        """Return a group's table for computation on the tier."""
        return self._tables[group].on_tier

    def on_host(self, group: int) -> ChecksumTable:
        """Return the same table for the host, which orders its reads behind the tier's writes."""
        return self._tables[group].on_host
