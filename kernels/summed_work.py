"""Cut spans of tiles into rows, of which the terms of a rule are added up, and tell which rows a span's totals are of.

A span may lie in several tiles. So an update that needs sums of whole spans has two stages. The first updates a tile
and writes the sums of each row's terms. Once all tiles that a span lies in have had it, the rows' sums are added up
in order (see `chunkc.kernels.row_sums`), and the second stage finds them in the span's scalars. Nothing is added
atomically: the bits of a run are the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from chunkc.kernels.elementwise_triton import WorkTable, rows_of_spans
from chunkc.kernels.formats import Span
from chunkc.kernels.host_memory import host_empty

ROW = 1 << 14
"""Elements of a row at most. Rows end at multiples of it in the space of all elements, so tiles that begin and end
there do not change a bit."""

NUM_SUMS = 2
"""Number of terms of an element that are added up, in rules that have any."""


@dataclass(frozen=True, slots=True, eq=False)
class SummedWork:
    """Work of both stages on spans, each of which has a row of scalars by its number.

    Args:
        tables: of each tile; of several tensors, one for all.
        spans: of each tile, in elements of it.
        firsts: for each tile, the number of its first row.
        totals: the table by which `chunkc.kernels.row_sums` adds up the sums of all rows, flattened, to the last
            scalars of each span.
        num_rows: of all tiles.
    """

    tables: tuple[WorkTable, ...]
    spans: tuple[tuple[Span, ...], ...]
    firsts: tuple[int, ...]
    totals: Tensor
    num_rows: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*(table.rows for table in self.tables), self.totals)

    def sent(self, send: Callable[[Tensor], Tensor]) -> SummedWork:
        """Make the same work of tensors that `send` has copied, such as to a device."""
        return replace(self, tables=tuple(table.sent(send) for table in self.tables), totals=send(self.totals))

    def new_sums(self) -> Tensor:
        """Allocate the sums of all rows, fp32 `[NUM_SUMS, num_rows]`, where the tables are."""
        if self.totals.is_cpu:
            return host_empty((NUM_SUMS, self.num_rows), torch.float32)
        return torch.empty(NUM_SUMS, self.num_rows, dtype=torch.float32, device=self.totals.device)

    def sums_of(self, tile: int, sums: Tensor) -> Tensor:
        """Return the sums of a tile's rows."""
        first = self.firsts[tile]
        return sums[:, first : first + len(self.tables[tile].rows)]


def summed_work(spans: Sequence[tuple[int, int]], tiles: Sequence[tuple[int, int]], num_scalars: int) -> SummedWork:
    """Cut spans into the rows of each tile, on the CPU, in numpy's memory.

    Args:
        spans: ranges `[begin, end)` in the space of all elements, in order and disjoint. Empty ones have no rows.
        tiles: ranges of that space, in order and disjoint. They cover every span.
        num_scalars: of each span, of which the last `NUM_SUMS` are its totals.

    Raises:
        ValueError: spans or tiles are out of order or overlap, or elements of a span lie in no tile.
    """
    for name, ranges in (("spans", spans), ("tiles", tiles)):
        before = [0, *(end for _, end in ranges)]
        if any(not previous_end <= begin <= end for previous_end, (begin, end) in zip(before, ranges)):
            raise ValueError(f"{name} must be in order and apart; got {list(ranges)}")
    rows, in_tiles, at = list[np.ndarray](), list[tuple[Span, ...]](), 0
    for start, stop in tiles:
        inside: list[Span] = []
        while at < len(spans) and spans[at][0] < stop:
            begin, end = max(spans[at][0], start), min(spans[at][1], stop)
            inside += [Span(begin, end, at)] if begin < end else []
            if spans[at][1] > stop:
                break
            at += 1
        in_tiles.append(tuple(Span(begin - start, end - start, number) for begin, end, number in inside))
        rows.append(rows_of_spans(inside, ROW) - np.array([start, start, 0]))
    if sum(end - begin for begin, end in spans) != sum(end - begin for tile in in_tiles for begin, end, _ in tile):
        raise ValueError(f"elements of the spans {list(spans)} lie in none of the tiles {list(tiles)}")
    firsts = np.cumsum([0, *map(len, rows)])
    num_rows = int(firsts[-1])
    of_spans = np.bincount(np.concatenate([table[:, 2] for table in rows]), minlength=len(spans))
    ends = np.cumsum(of_spans)
    places = num_scalars * np.arange(1, len(spans) + 1) - NUM_SUMS
    of_one = np.stack([ends - of_spans, ends, places], axis=1)
    totals = np.concatenate([of_one + np.array([k * num_rows, k * num_rows, k]) for k in range(NUM_SUMS)])
    return SummedWork(
        tuple(_table(table, stop - start, len(spans)) for table, (start, stop) in zip(rows, tiles, strict=True)),
        tuple(in_tiles),
        tuple(firsts[:-1].tolist()),
        torch.from_numpy(totals),
        num_rows,
    )


def summed_work_of_tensors(tensors: Sequence[tuple[int, int]], num_scalars: int) -> SummedWork:
    """Cut several tensors into the rows of one launch, see `chunkc.kernels.elementwise_triton.work_of_tensors`.

    Args:
        tensors: ranges in a space that determines where their rows end, in order and disjoint. None is empty.
    """
    work = summed_work(tensors, tensors, num_scalars)
    rows = np.concatenate([table.rows.numpy() for table in work.tables])
    table = _table(np.concatenate([rows, rows[:, 2:]], axis=1), tensors[0][1] - tensors[0][0], len(tensors))
    return replace(work, tables=(table,), firsts=(0,))


def _table(rows: np.ndarray, num_elements: int, num_groups: int) -> WorkTable:
    return WorkTable(torch.from_numpy(rows), num_elements, num_groups, 1, has_long_rows=True)
