"""Columns, cells and the counts of `coverage.py`: plain data, shared by the command and its workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

TRAINED, REFUSED, FAILED = "trained", "refused", "failed"
DEFAULT_FAILS, PLAIN_FAILS, NOT_BUILT = "default backend fails too", "plain PyTorch fails", "not built"

COUNTED = (TRAINED, REFUSED, FAILED)
"""Outcomes of what the default backend trains: the percentage is of these."""


@dataclass(frozen=True)
class Cell:
    """Result of one architecture in one column.

    Attributes:
        outcome: of the words above.
        stage: where it ended, of what was refused or failed.
        message: why; of what was trained, what there is to say.
        seconds: it took.
    """

    outcome: str
    stage: str
    message: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Column:
    """Training setting of a column: named `codegen/setting`."""

    setting: str
    codegen: str
    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scaled: bool = False
    dropout: bool = False
    checkpointing: bool = False

    @property
    def name(self) -> str:
        return f"{self.codegen}/{self.setting}"

    @property
    def is_exact(self) -> bool:
        """Whether losses are those of plain PyTorch but for rounding in fp32."""
        return self.weights == torch.float32 and self.autocast is None

    def with_codegen(self, codegen: str) -> Column:
        return replace(self, codegen=codegen)

    @staticmethod
    def named(name: str) -> Column:
        codegen, _, setting = name.partition("/")
        return replace(_SETTINGS[setting], codegen=codegen)


_SETTINGS: Mapping[str, Column] = {
    column.setting: column
    for column in (
        Column("fp32", ""),
        Column("bf16", "", weights=torch.bfloat16),
        Column("autocast-bf16", "", autocast=torch.bfloat16),
        Column("autocast-fp16-scaler", "", autocast=torch.float16, scaled=True),
        Column("dropout", "", dropout=True),
        Column("autocast-dropout", "", autocast=torch.bfloat16, dropout=True),
        Column("checkpointing", "", checkpointing=True),
    )
}

COLUMNS: tuple[str, ...] = tuple(f"{codegen}/{setting}" for codegen in ("eager", "inductor") for setting in _SETTINGS)


def counts(cells: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count cells by outcome."""
    found = dict.fromkeys((*COUNTED, DEFAULT_FAILS, PLAIN_FAILS, NOT_BUILT), 0)
    for cell in cells:
        found[cell["outcome"]] += 1
    return found


def percentage(cells: Iterable[Mapping[str, Any]]) -> float | None:
    """Percentage of the default backend's successes that chunkc trains; None if there are none."""
    found = counts(cells)
    tried = sum(found[outcome] for outcome in COUNTED)
    return 100 * found[TRAINED] / tried if tried else None
