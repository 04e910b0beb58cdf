"""A group's table of rows has a sample first: at least a row of each tensor, and one of `SAMPLED` of large ones."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkc.ir.sums import ROW, rows_of
from chunkc.kernels import row_sums_cpu
from chunkc.runtime.store.checksums import SAMPLED, ChecksumTable, sampled_first


@given(st.lists(st.integers(1, 40 * ROW), min_size=1, max_size=5))
def test_the_sample(numels: list[int]) -> None:
    begins = np.cumsum([0, *numels]).tolist()
    extents = list(zip(begins, numels, strict=False))
    table, num_sampled = sampled_first(extents)
    assert sorted(map(tuple, table[:, :2].tolist())) == sorted(map(tuple, rows_of(extents)[:, :2].tolist()))
    assert table[:, 2].tolist() == list(range(len(table)))
    for begin, numel in extents:
        sample = [row for row in table[:num_sampled] if begin <= row[0] < begin + numel]
        assert len(sample) == -(-numel // (SAMPLED * ROW))


def test_a_sample_sees_what_changes_all_elements_and_the_whole_sees_each() -> None:
    data = torch.randn(20 * ROW)
    rows, num_sampled = sampled_first([(0, len(data))])
    flat = torch.zeros(rows.size + 4 * len(rows), dtype=torch.int64)
    table = ChecksumTable.over(flat, len(rows), num_sampled)
    table.rows.copy_(torch.from_numpy(rows))
    table.note(row_sums_cpu.checksums, {"param": data, "grad": data})

    def is_unchanged(kind: str, *, sample: bool) -> bool:
        table.compute(row_sums_cpu.checksums, kind, data, sample=sample)
        return table.is_unchanged(kind, sample=sample)

    assert is_unchanged("grad", sample=True)
    assert is_unchanged("param", sample=False)
    data[ROW + 1] += 1
    assert is_unchanged("grad", sample=True)
    assert not is_unchanged("grad", sample=False)
    data.mul_(0.5)
    assert not is_unchanged("grad", sample=True)
