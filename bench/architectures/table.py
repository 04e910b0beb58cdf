"""Columns, outcomes and tables of `coverage.py`: plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from judging import table
from judging.table import DEFAULT_FAILS, REFUSED, Line, percentage, plain
from measuring.metrics import Row, Section, one

TRAINED, FAILED = "trained", "failed"
PLAIN_FAILS, NOT_BUILT = "plain PyTorch fails", "not built"

COUNTED = (TRAINED, REFUSED, FAILED)
"""Outcomes of what the default backend trains: the percentage is of these."""
FAILURES = (REFUSED, FAILED)
"""Outcomes of what chunkc does not train, and the default backend does."""


@dataclass(frozen=True)
class Column(table.Column):
    """Training setting of a column."""

    weights: torch.dtype = torch.float32
    scaled: bool = False
    dropout: bool = False
    checkpointing: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether losses are those of plain PyTorch but for rounding in fp32."""
        return self.weights == torch.float32 and self.autocast is None


_SETTINGS = (
    Column("", "fp32"),
    Column("", "bf16", weights=torch.bfloat16),
    Column("", "autocast-bf16", torch.bfloat16),
    Column("", "autocast-fp16-scaler", torch.float16, scaled=True),
    Column("", "dropout", dropout=True),
    Column("", "autocast-dropout", torch.bfloat16, dropout=True),
    Column("", "checkpointing", checkpointing=True),
)
COLUMNS = table.by_name(replace(column, codegen=codegen) for codegen in ("eager", "inductor") for column in _SETTINGS)


def sections(lines: Sequence[Line]) -> list[Section]:
    """Make tables: percentages by column, what keeps the others from training, and every architecture."""
    architectures: dict[str, dict[str, Line]] = {}
    for line in lines:
        architectures.setdefault(line["case"], {})[line["column"]] = line
    setting = {"num_architectures": len(architectures)}
    return [
        Section("percentages", setting, [row for name in COLUMNS for row in _percentages(name, lines)]),
        Section("why not", {}, _reasons(lines)),
        Section("architectures", setting, [_architecture(*pair) for pair in sorted(architectures.items())]),
    ]


def _percentages(column: str, lines: Sequence[Line]) -> list[Row]:
    outcomes = [line["outcome"] for line in lines if line["column"] == column]
    if not outcomes:
        return []
    counts, share = Counter(outcomes), percentage(outcomes, COUNTED)
    words = (*COUNTED, DEFAULT_FAILS, PLAIN_FAILS, NOT_BUILT)
    metrics = {} if share is None else {"percent of what the default backend trains": one("number", round(share, 2))}
    return [Row({"column": column}, metrics | {word: one("number", counts[word]) for word in words})]


def _reasons(lines: Sequence[Line]) -> list[Row]:
    reasons = Counter((line["outcome"], line["message"][:160]) for line in lines if line["outcome"] in FAILURES)
    return [
        Row({"outcome": outcome, "message": plain(message)}, {"cells": one("number", count)})
        for (outcome, message), count in reasons.most_common()
    ]


def _architecture(name: str, cells: Mapping[str, Line]) -> Row:
    sizes = [cell["num_parameters"] for cell in cells.values() if cell.get("num_parameters") is not None]
    return Row(
        {"architecture": name, **{column: _short(cells[column]) for column in COLUMNS if column in cells}},
        {"parameters": one("number", sizes[0])} if sizes else {},
        "; ".join(dict.fromkeys(plain(cell["message"]) for cell in cells.values() if cell["message"])),
        any(cell["outcome"] in FAILURES for cell in cells.values()),
    )


def _short(cell: Line) -> str:
    return f"{cell['outcome']} ({cell['stage']})" if cell["stage"] else cell["outcome"]
