"""Split gradients into rows for sums and checksums, so that the bits of a sum do not depend on where the gradient lies.

A row is `ROW` elements of one gradient, in the order of memory, counted from its own beginning; the last one may be
shorter. Each is summed up by itself, in fp64 and in one order (see `chunkc.kernels.row_sums_cpu`). So sums have the
same bits in a chunk's slot, at home and anywhere else, however many gradients are summed up at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

ROW = 1 << 16
"""Number of elements of a row."""

COLUMNS = 3
"""Columns of a table of rows: begin and end in elements from a base, and the sum's place."""

SumSquares = Callable[[Tensor, Tensor, Tensor], None]
"""Function `(base, rows, sums)` that sums up the squares of rows of elements.

No square of a 16-bit or fp32 number overflows in fp64: a sum is finite if and only if each element is.

Args:
    base: a tensor of the elements' dtype; rows count from its first element.
    rows: int64 `[num_rows, COLUMNS]`, contiguous, on the device that computes.
    sums: fp64, contiguous; written at the places in the table.
"""

MIX = (0x85EBCA6B, 0xC2B2AE35)
"""Factors of the mixing of a word, murmur3's: a bijection of 32 bits."""

PLACE = 0x9E3779B9
"""Factor of a word's place in its row: the same word mixes to other bits at another place."""

Checksum = Callable[[Tensor, Tensor, Tensor], None]
"""Function `(base, rows, sums)` that computes a checksum of each row of words: int64.

Each word (16 bits with their sign extended, or 32) is combined with its place by exclusive or and mixed; a row's
checksum is the sum of these. One changed word always changes it. Of rows with several, about one in 2^40 keeps it.

Args:
    base: an int16 or int32 tensor; rows count from its first element.
    rows: as of `SumSquares`.
    sums: int64, contiguous; written at the places in the table.
"""


def num_rows(numel: int) -> int:
    """Return the number of rows of a gradient of so many elements."""
    return -(-numel // ROW)


def rows_of(extents: Sequence[tuple[int, int]]) -> np.ndarray:
    """Build the table for gradients given as (first element, number of elements); their sums follow each other.

    Returns:
        int64 `[num_rows, COLUMNS]`.
    """
    spans = []
    for begin, numel in extents:
        cuts = np.minimum(np.arange(num_rows(numel) + 1, dtype=np.int64) * ROW, numel) + begin
        spans.append(np.stack([cuts[:-1], cuts[1:]], axis=1))
    table = np.concatenate(spans) if spans else np.empty((0, 2), dtype=np.int64)
    return np.concatenate([table, np.arange(len(table), dtype=np.int64)[:, None]], axis=1)
