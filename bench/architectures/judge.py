"""Judge an architecture in one column: trained under chunkc, compared with plain PyTorch and the default backend."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch._dynamo
import torch._inductor.compile_fx
from judging.budgets import AMPLE_NBYTES, Differs, compiled_for, fresh, in_the_smallest
from judging.table import DEFAULT_FAILS, REFUSED, Cell
from torch import nn

import chunkc
import chunkc.backend
from architectures.models import Subject
from architectures.table import FAILED, PLAIN_FAILS, TRAINED, Column
from architectures.training import (
    LOOSE_TOLERANCE,
    NUM_STEPS,
    TOLERANCE,
    Progress,
    Trained,
    check_close,
    distance,
    run,
)
from chunkc.runtime.device import cpu_allocator
from chunkc.session.session import sessions_of

SHARE = 1.3
"""Of the smallest budget."""

NUDGE = 2**-24
"""Of a weight, relative: no more than rounding it once to fp32 may change it."""


def _by_default(model: nn.Module) -> nn.Module:
    return torch.compile(model)  # type: ignore[return-value]


def _in_ample_room(subject: Subject, column: Column, progress: Progress) -> tuple[Trained, int | None]:
    """Steps alone where everything fits, and the smallest budget; None where Dynamo compiled nothing."""
    fresh()
    trained, called = run(subject, column, progress, compiled_for(AMPLE_NBYTES, column.codegen), whole=False)
    if not sessions_of(called.parameters()):
        return trained, None
    return trained, chunkc.report(called).minimum_budget_nbytes


@dataclass(frozen=True)
class _NearMinimum:
    """Results of chunkc's training in slightly more than its smallest budget.

    Attributes:
        minimum_nbytes: the smallest budget that chunkc named last.
        excess_nbytes: by how much the measured peak exceeds the budget.
        untaken_nbytes: of parameters that no graph takes. The budget has no room for them, nor for their gradients and
            AdamW's two states, so the peak is counted without any of these.
    """

    trained: Trained
    minimum_nbytes: int
    excess_nbytes: int
    untaken_nbytes: int


def _near_the_minimum(subject: Subject, column: Column, progress: Progress, minimum_nbytes: int) -> _NearMinimum:
    budget_nbytes = int(SHARE * minimum_nbytes)
    fresh()
    foreign_nbytes = cpu_allocator.current_nbytes()
    trained, called = run(subject, column, progress, compiled_for(budget_nbytes, column.codegen), whole=True)
    untaken_nbytes = sum(p.nbytes for p in called.parameters() if not sessions_of([p]))
    peak_nbytes = (trained.peak_nbytes or 0) - foreign_nbytes - 4 * untaken_nbytes
    return _NearMinimum(trained, minimum_nbytes, max(0, peak_nbytes - budget_nbytes), untaken_nbytes)


NUM_NUDGES = 3
"""One may move losses ten times as far as another."""


def nudged(subject: Subject, seed: int) -> Subject:
    """Build the architecture with weights moved by roundings."""

    def make() -> nn.Module:
        model, numbers = subject.make(), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + NUDGE * torch.randn(parameter.shape, generator=numbers))
        return model

    return replace(subject, make=make)


class Judge:
    """The cells of one architecture; what plain PyTorch does is computed once for all columns that share it."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._plain: dict[str, Trained | str] = {}
        self._default: dict[str, Trained | str] = {}

    def cell(self, column: Column) -> Cell:
        """Judge one column."""
        progress = Progress()
        if column.checkpointing and not self._subject.supports_checkpointing:
            return Cell(PLAIN_FAILS, "it has no gradient checkpointing")
        plain = self._by_plain(column)
        if isinstance(plain, str):
            return Cell(PLAIN_FAILS, plain)
        try:
            return Cell(TRAINED, self._check(column, plain, progress))
        except Exception as error:
            message = _message(error)
            outcome = REFUSED if isinstance(error, chunkc.ChunkcError) else FAILED
        default = self._by_default(column)
        if isinstance(default, str):
            return Cell(DEFAULT_FAILS, f"{message} | default backend: {default}", progress.now)
        return Cell(outcome, message, progress.now)

    def _by_plain(self, column: Column) -> Trained | str:
        key = column.setting
        if key not in self._plain:
            try:
                fresh()
                self._plain[key] = run(self._subject, column, Progress(), None, whole=True)[0]
            except Exception as error:
                self._plain[key] = _message(error)
        return self._plain[key]

    def _by_default(self, column: Column) -> Trained | str:
        key = column.setting
        if key not in self._default:
            progress = Progress()
            try:
                fresh()
                found = run(self._subject, column, progress, _by_default, whole=True)[0]
                plain = self._by_plain(column)
                assert isinstance(plain, Trained)
                if column.is_exact and not column.dropout:
                    check_close(column, *found.losses.paired_with(plain.losses), "losses")
                self._default[key] = found
            except Exception as error:
                self._default[key] = f"{progress.now}: {_message(error)}"
        return self._default[key]

    def _check(self, column: Column, plain: Trained, progress: Progress) -> str:
        subject = self._subject
        ample, minimum = _in_ample_room(subject, column, progress)
        notes = []
        if not column.dropout:
            notes += self._check_losses(column, ample, plain)
        if minimum is None:
            return "nothing was compiled: Dynamo leaves all of it to eager PyTorch"
        near = in_the_smallest(partial(_near_the_minimum, subject, column, progress), minimum)
        if not column.dropout:
            notes += self._check_losses(column, near.trained, plain)
        if not _same_bits(near.trained.losses.steps[:NUM_STEPS], ample.losses.steps):
            raise Differs("losses have other bits under another budget")
        if near.excess_nbytes:
            raise Differs(f"measured {near.excess_nbytes:,} bytes beyond the budget")
        return "; ".join(dict.fromkeys([*notes, *_notes(near, minimum)]))

    def _check_losses(self, column: Column, trained: Trained, plain: Trained) -> list[str]:
        """Raises `Differs`, or gives what there is to say."""
        far = distance(*trained.losses.paired_with(plain.losses))
        if far <= (TOLERANCE if column.is_exact else LOOSE_TOLERANCE):
            return []
        if column.is_exact:
            own = self._own_distance(column, plain)
            if far <= min(own, LOOSE_TOLERANCE):
                return [f"losses: {far:.2g} from plain PyTorch's, which rounded weights move by {own:.2g}"]
            raise Differs(f"losses: {far:.2g} from plain PyTorch's, relatively")
        default = self._by_default(column)
        if isinstance(default, str):
            raise Differs(f"losses: {far:.2g} from plain PyTorch's, relatively")
        other = distance(*default.losses.paired_with(plain.losses))
        if not far <= max(3 * other, LOOSE_TOLERANCE):
            raise Differs(f"losses: {far:.2g} from plain PyTorch's, relatively; the default backend's {other:.2g}")
        return []

    def _own_distance(self, column: Column, plain: Trained) -> float:
        """Measure how far plain PyTorch's losses move if weights move by as little as roundings.

        In some models such a difference doubles with every layer and step: under any other code losses differ as much.
        """
        farthest = 0.0
        for seed in range(NUM_NUDGES):
            fresh()
            moved = run(nudged(self._subject, seed), column, Progress(), None, whole=True)[0]
            farthest = max(farthest, distance(*moved.losses.paired_with(plain.losses)))
        return farthest


def _notes(near: _NearMinimum, first_minimum_nbytes: int) -> Iterator[str]:
    if near.minimum_nbytes != first_minimum_nbytes:
        yield f"the smallest budget grew by {near.minimum_nbytes / first_minimum_nbytes - 1:.1%} after the first"
    if near.untaken_nbytes:
        yield f"{near.untaken_nbytes:,} bytes of parameters that no graph takes"


def _same_bits(left: Sequence[float], right: Sequence[float]) -> bool:
    return all(a == b or (a != a and b != b) for a, b in zip(left, right, strict=True))


def _message(error: BaseException) -> str:
    """Type, first lines and the innermost frame that is not PyTorch's own plumbing, on one line."""
    text = " ".join(str(error).split())[:300]
    frames = traceback.extract_tb(error.__traceback__)
    last = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{last}"
