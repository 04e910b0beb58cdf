"""Columns, cells and their counts: plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

REFUSED = "refused"
DEFAULT_FAILS = "default backend fails too"

Line = Mapping[str, Any]
"""A cell as it is written: its fields, `case`, `column`, `seconds`, and chunkc's `commit`."""


@dataclass(frozen=True)
class Cell:
    """Result of one case in one column.

    Attributes:
        outcome: of the suite's words.
        message: why; of what was trained, what there is to say.
        stage: where it ended, of what was refused or failed in a run of several stages.
    """

    outcome: str
    message: str = ""
    stage: str = ""


@dataclass(frozen=True)
class Column:
    """Setting that cases are trained in, named `codegen/setting`.

    Attributes:
        autocast: of the forward.
    """

    codegen: str
    setting: str
    autocast: torch.dtype | None = None

    @property
    def name(self) -> str:
        return f"{self.codegen}/{self.setting}"

    def precision(self) -> AbstractContextManager[Any]:
        """Make the context of a forward."""
        return torch.autocast("cpu", self.autocast) if self.autocast is not None else nullcontext()


AnyColumn = TypeVar("AnyColumn", bound=Column)


def by_name(columns: Iterable[AnyColumn]) -> Mapping[str, AnyColumn]:
    return {column.name: column for column in columns}


def percentage(outcomes: Iterable[str], counted: Sequence[str]) -> float | None:
    """Percentage of the default backend's successes that chunkc trains; None if there are none.

    Args:
        counted: outcomes of what the default backend trains, first the one of what chunkc does, too.
    """
    found = Counter(outcomes)
    tried = sum(found[outcome] for outcome in counted)
    return 100 * found[counted[0]] / tried if tried else None


def plain(text: str) -> str:
    """Format as a cell of Markdown."""
    return " ".join(text.replace("|", "/").split())


def first_line(error: BaseException) -> str:
    """Shorten an error to its type and the first line of its message."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"
