"""Columns, outcomes and tables of `conformance.py`: plain data."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from judging import table
from judging.table import DEFAULT_FAILS, REFUSED, Line, percentage, plain
from measuring.metrics import Row, Section, one

TRAINED = "as plain"
"""In a column of training: it trains with the values of the reference, inside both budgets. In a column of calls: no
ATen call allocates more than is predicted."""
WRONG, TOO_LOW, INTERNAL, CRASH, TOO_LONG = "wrong value", "predicted too low", "internal error", "crash", "too long"
NOT_COMPILED = "left to eager PyTorch"
NOTHING_TO_TRAIN = "plain PyTorch does not train it"

OUTCOMES = (TRAINED, REFUSED, WRONG, TOO_LOW, INTERNAL, CRASH, TOO_LONG, NOT_COMPILED, DEFAULT_FAILS, NOTHING_TO_TRAIN)
FAULTS = (WRONG, TOO_LOW, INTERNAL, CRASH, TOO_LONG)
"""Outcomes that are faults of chunkc."""
COUNTED = (TRAINED, REFUSED, *FAULTS)
"""Outcomes of what the default backend compiles and trains: the percentage is of these."""


@dataclass(frozen=True)
class Cell(table.Cell):
    """Result of one case in one column: the worst of its samples, with a message that begins with the sample.

    Attributes:
        num_samples: of those that have the outcome or a better one.
        findings: of a column of calls: ATen operators predicted wrongly, as `calls.Finding` has them.
    """

    num_samples: int = 0
    num_calls: int = 0
    findings: tuple[Mapping[str, Any], ...] = ()


def worst(cells: Sequence[Cell]) -> Cell:
    """Merge the cells of a case's samples: the first of the worst outcome, with the number of all samples."""
    ranks = (*FAULTS, REFUSED, DEFAULT_FAILS, NOT_COMPILED, TRAINED, NOTHING_TO_TRAIN)
    return replace(min(cells, key=lambda cell: ranks.index(cell.outcome)), num_samples=len(cells))


@dataclass(frozen=True)
class Column(table.Column):
    """Setting of a column; the code "calls" compares ATen calls, and trains nothing.

    Attributes:
        dtype: of weights, or of the samples of a column of calls.
        changes: the second step's batch is larger than the first's.
        every: the column has the cases with a hash divisible by this.
        num_samples: of a case.
    """

    dtype: torch.dtype = torch.float32
    changes: bool = False
    every: int = 1
    num_samples: int = 2

    def with_one_sample(self) -> Column:
        return replace(self, num_samples=1)


_BF16 = torch.bfloat16
COLUMNS = table.by_name(
    (
        Column("eager", "float32"),
        Column("calls", "float32"),
        Column("eager", "autocast-bfloat16", _BF16, num_samples=1),
        Column("eager", "float32-changing", changes=True, num_samples=1),
        Column("inductor", "float32", every=10, num_samples=1),
        Column("inductor", "autocast-bfloat16", _BF16, every=20, num_samples=1),
        Column("inductor", "float32-changing", changes=True, every=20, num_samples=1),
        Column("calls", "bfloat16", dtype=_BF16),
        Column("calls", "int64", dtype=torch.int64),
        Column("calls", "complex64", dtype=torch.complex64),
    )
)
"""By name, in the order in which they are run."""


def falls_on(case: str, index: int, count: int) -> bool:
    """Whether a case is in the `index`-th of `count` parts, by its name's hash."""
    return zlib.crc32(case.encode()) % count == index


def sections(lines: Sequence[Line], num_cases: Mapping[tuple[str, str], int]) -> list[Section]:
    """Make the tables that have rows: counts by database and column, cases that are not `TRAINED`, ATen operators.

    Args:
        num_cases: by column and database, how many the column has when it is whole.
    """
    return [section for section in (_counts(lines, num_cases), _others(lines), _operators(lines)) if section.rows]


def _counts(lines: Sequence[Line], num_cases: Mapping[tuple[str, str], int]) -> Section:
    rows = []
    for column in COLUMNS.values():
        for database in ("op", "module", "optim"):
            outcomes = [line["outcome"] for line in lines if _is_in(line, column.name, database)]
            if not outcomes:
                continue
            counts = Counter(outcomes)
            metrics = {"cases": one("number", len(outcomes)), "of": one("number", num_cases[column.name, database])}
            metrics |= {outcome: one("number", counts[outcome]) for outcome in OUTCOMES if counts[outcome]}
            if (share := percentage(outcomes, COUNTED)) is not None:
                metrics["percent"] = one("number", round(share, 1))
            rows.append(Row({"column": column.name, "database": database}, metrics))
    return Section("outcomes", {}, rows)


def _is_in(line: Line, column: str, database: str) -> bool:
    return line["column"] == column and line["case"].startswith(f"{database}/")


def _others(lines: Sequence[Line]) -> Section:
    """List what is not `TRAINED`, cases with the same reason in one row."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for line in lines:
        if line["outcome"] not in (TRAINED, NOTHING_TO_TRAIN):
            cases.setdefault((line["outcome"], line["column"], plain(line["message"])[:240]), []).append(line["case"])
    keys = sorted(cases, key=lambda key: (OUTCOMES.index(key[0]), list(COLUMNS).index(key[1]), key[2]))
    rows = [
        Row(
            {"outcome": outcome, "column": column, "cases": ", ".join(cases[outcome, column, reason])},
            {},
            reason,
            is_failure=outcome in FAULTS,
        )
        for outcome, column, reason in keys
    ]
    return Section("what is not as plain", {}, rows)


def _operators(lines: Sequence[Line]) -> Section:
    """List ATen operators that are predicted wrongly, with an example."""
    numbers: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    for line in lines:
        for finding in line["findings"]:
            key = finding["kind"], finding["target"]
            numbers[key] += finding["number"]
            examples.setdefault(key, f"{line['case']} {line['column']}: {finding['examples'][0]}")
    rows = [
        Row(
            {"prediction": kind, "operator": target},
            {"calls": one("number", count)},
            plain(examples[kind, target])[:240],
        )
        for (kind, target), count in sorted(numbers.items(), key=lambda item: (item[0][0], -item[1]))
    ]
    return Section("ATen calls", {"num_calls": sum(line["num_calls"] for line in lines)}, rows)
