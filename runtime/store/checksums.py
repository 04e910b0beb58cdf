"""Note what parameters and gradients contain when their staged update begins, and compare it with home before a commit.

A user may write home where no version counter sees it: through `.data`, an array, a kept view, a collective or a kernel
of another library. Checksums of all rows see every such write. Of gradients that no Python code has used (see
`watched_gradients`) only a sample is compared: C code alone can have written these, and the sample sees what changes
whole tensors. Tables and sums lie at home, as those of norms do, so that they take no room on the compute tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chunkc.ir.layout import GRAD, PARAM, ChunkGroup, TensorSlice
from chunkc.ir.sums import COLUMNS, Checksum, num_rows, rows_of
from chunkc.runtime.storage.homes import Home

KINDS = (PARAM, GRAD)
"""Kinds of data, both of one dtype, that an update reads and users may write between a backward and its step."""

SAMPLED = 16
"""One row of so many is in the sample, and at least one of each tensor."""

_INT64_NBYTES = 8


@dataclass(frozen=True)
class ChecksumTable:
    """A group's table of rows, and the checksums of each kind of data: as noted, and now. All in one memory.

    Attributes:
        rows: int64 `[num_rows, COLUMNS]`, in words; those of the sample come first.
        num_sampled: rows of the sample.
        noted, now: int64 `[num_rows]` by kind.
    """

    rows: torch.Tensor
    num_sampled: int
    noted: Mapping[str, torch.Tensor]
    now: Mapping[str, torch.Tensor]

    @staticmethod
    def over(flat: torch.Tensor, num_rows: int, num_sampled: int) -> ChecksumTable:
        """Divide a flat int64 tensor into a table and its checksums."""
        rows, *sums = flat.split([num_rows * COLUMNS, *[num_rows] * 2 * len(KINDS)])
        noted, now = sums[: len(KINDS)], sums[len(KINDS) :]
        by_kind = dict(zip(KINDS, noted, strict=True)), dict(zip(KINDS, now, strict=True))
        return ChecksumTable(rows.view(num_rows, COLUMNS), num_sampled, *by_kind)

    def note(self, checksum: Checksum, data: Mapping[str, torch.Tensor]) -> None:
        """Compute the checksums of flat data, by kind, and note them."""
        for kind in KINDS:
            checksum(words_of(data[kind]), self.rows, self.noted[kind])

    def compute(self, checksum: Checksum, kind: str, data: torch.Tensor, *, sample: bool) -> None:
        """Compute the checksums of flat data, or of a sample of it, to compare them with those that were noted."""
        checksum(words_of(data), self.rows[: self._count(sample)], self.now[kind])

    def is_unchanged(self, kind: str, *, sample: bool) -> bool:
        """Whether the checksums computed last are those that were noted; of a table that the host reads."""
        count = self._count(sample)
        return torch.equal(self.noted[kind][:count], self.now[kind][:count])

    def _count(self, sample: bool) -> int:
        return self.num_sampled if sample else len(self.rows)


def words_of(data: torch.Tensor) -> torch.Tensor:
    """View flat data as the words that checksums are of."""
    return data.detach().view(torch.int16 if data.dtype.itemsize == 2 else torch.int32)


def sampled_first(extents: Sequence[tuple[int, int]]) -> tuple[np.ndarray, int]:
    """Build the table of rows of tensors, see `rows_of`, with a sample's rows first, and count these.

    The sample has the middle row of each `SAMPLED` rows of a tensor, so at least one of each tensor.
    """
    table = rows_of(extents)
    counts = [num_rows(numel) for _, numel in extents]
    number = np.concatenate([np.arange(count) for count in counts])
    first = number - number % SAMPLED
    last = np.minimum(first + SAMPLED, np.repeat(counts, counts)) - 1
    is_sampled = number == (first + last) // 2
    # Begins and ends change places; the third column, the sums' places, stays in order.
    table[:, :2] = np.concatenate([table[is_sampled, :2], table[~is_sampled, :2]])
    return table, int(is_sampled.sum())


@dataclass(frozen=True)
class _Tables:
    """A group's table for the compute tier, and the same memory for the host."""

    slices: tuple[TensorSlice, ...]
    on_tier: ChecksumTable
    on_host: ChecksumTable

    @staticmethod
    def of(group: ChunkGroup, home: Home) -> _Tables:
        words = -(-group.dtype.itemsize // 4)  # per element
        table, num_sampled = sampled_first([(s.offset * words, s.spec.numel * words) for s in group.slices])
        numel = len(table) * (COLUMNS + 2 * len(KINDS))
        region = home.allocate(numel * _INT64_NBYTES)
        on_host = ChecksumTable.over(home.bytes(region).view(torch.int64)[:numel], len(table), num_sampled)
        on_host.rows.numpy()[:] = table
        on_tier = ChecksumTable.over(home.tensor(region, torch.int64, (numel,), (1,), 0), len(table), num_sampled)
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
