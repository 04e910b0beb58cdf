"""Judge a case in one column: trained under chunkc in two budgets, compared with plain PyTorch and the default backend.

The reference of eager code is plain PyTorch, to the bit; where plain PyTorch's bits are others, those of "aot_eager",
which compiles the same graph. Inductor's code depends on where a graph is cut: values are as close to plain PyTorch's
as those of the backend "inductor", or closer than PyTorch's own tests ask for, and the budgets agree to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial

import torch
from judging.budgets import AMPLE_NBYTES, Compile, Differs, compiled_for, fresh, in_the_smallest
from judging.table import DEFAULT_FAILS, REFUSED, first_line
from torch import nn

import chunkc
from chunkc.session.session import Session, sessions_of
from databases import calls, modules, optimizers
from databases.table import (
    INTERNAL,
    NOT_COMPILED,
    NOTHING_TO_TRAIN,
    TOO_LOW,
    TRAINED,
    WRONG,
    Cell,
    Column,
    worst,
)
from databases.training import Subject, Values, close, difference, same_bits, train

MAX_TRIED = 8
"""Samples of a case that are looked at, for those that plain PyTorch trains."""

DEFAULT_BACKENDS = {"eager": "aot_eager", "inductor": "inductor"}

_LEARNING_RATE = 0.1


class _TooLow(Exception):
    """Raised where more bytes were measured than predicted."""


def judge(case: str, column: Column, *, smallest_only: bool = False) -> Cell:
    """Judge one case.

    Args:
        smallest_only: leave the large budget out.
    """
    torch.manual_seed(0)
    try:
        material = calls.calls_of(case, column.dtype) if column.codegen == "calls" else _subjects(case, column)
    except Exception as error:
        return Cell(NOTHING_TO_TRAIN, f"the database fails: {first_line(error)}")
    if column.codegen == "calls":
        return _compared(calls.compare(material))
    cells: list[Cell] = []
    nothing = Cell(NOTHING_TO_TRAIN, "it has no sample with a gradient")
    for subject in material:
        cell = _judged(subject, column, smallest_only=smallest_only)
        cell = replace(cell, message=f"{subject.name}: {cell.message}" if cell.message else "")
        if cell.outcome == NOTHING_TO_TRAIN:
            nothing = cell
            continue
        cells.append(cell)
        if len(cells) == column.num_samples and not case.startswith("optim/"):
            break
    return worst(cells) if cells else nothing


def _subjects(case: str, column: Column) -> list[Subject]:
    if case.startswith("optim/"):
        return list(optimizers.subjects_of(case))
    samples = itertools.islice(modules.samples_of(case, changes=column.changes), MAX_TRIED)
    return [Subject(f"sample {number}", sample, _sgd, _sgd) for number, sample in enumerate(samples)]


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make chunkc's optimizer, for plain PyTorch too: it rounds unlike PyTorch's, which cases of `optim_db` have."""
    return chunkc.optim.SGD(parameters, lr=_LEARNING_RATE)


def _compared(comparison: calls.Comparison) -> Cell:
    findings = tuple(asdict(finding) for finding in comparison.findings.values())
    for finding in findings:
        if finding["kind"] in ("too low", "raised"):
            outcome = TOO_LOW if finding["kind"] == "too low" else INTERNAL
            message = f"{finding['target']} {finding['examples'][0]}"
            return Cell(outcome, message, num_calls=comparison.num_calls, findings=findings)
    return Cell(TRAINED, num_calls=comparison.num_calls, findings=findings)


def _judged(subject: Subject, column: Column, *, smallest_only: bool) -> Cell:
    try:
        plain = _trained(subject, column, None)
    except Exception as error:
        return Cell(NOTHING_TO_TRAIN, first_line(error))
    values = None
    try:
        values = _by_chunkc(subject, column, smallest_only=smallest_only)
        if values is None:
            return Cell(NOT_COMPILED, "Dynamo compiles nothing of it")
        is_exact = column.codegen == "eager" and subject.is_exact
        text = difference(values, plain, same_bits if is_exact else close)
        if text is None:
            return Cell(TRAINED)
        failed = Cell(WRONG, text)
    except _TooLow as error:
        return Cell(TOO_LOW, str(error))
    except Differs as error:
        failed = Cell(WRONG, str(error))
    except Exception as error:
        is_own = isinstance(error, chunkc.ChunkcError) and not isinstance(error, chunkc.InternalError)
        failed = Cell(REFUSED if is_own else INTERNAL, first_line(error))
    return _unless_the_default_fails(failed, values, subject, column, plain)


def _unless_the_default_fails(
    failed: Cell, values: Values | None, subject: Subject, column: Column, plain: Values
) -> Cell:
    """Judge a failure by what PyTorch's own backend does, and wrong values by how reproducible plain PyTorch's are."""
    backend = DEFAULT_BACKENDS[column.codegen]
    try:
        default = _trained(subject, column, lambda model: torch.compile(model, backend=backend))  # type: ignore[return-value, arg-type]
    except Exception as error:
        return Cell(DEFAULT_FAILS, f"{failed.message} / {backend}: {first_line(error)}")
    if failed.outcome != WRONG:
        return failed
    if values is not None and difference(values, default, same_bits) is None:
        return Cell(TRAINED)
    if (text := difference(_trained(subject, column, None), plain, same_bits)) is not None:
        return Cell(NOTHING_TO_TRAIN, f"two runs of plain PyTorch differ: {text}")
    if column.codegen == "inductor" and (text := difference(default, plain, close)) is not None:
        return Cell(DEFAULT_FAILS, f"{failed.message} / {backend}: {text}")
    return failed


def _trained(subject: Subject, column: Column, compile_it: Compile | None) -> Values:
    fresh()
    return train(subject.sample, column, compile_it, subject.plain_optimizer)[0]


def _by_chunkc(subject: Subject, column: Column, *, smallest_only: bool) -> Values | None:
    """Train in a large budget and in the smallest, which must agree; None where nothing is compiled."""
    ample = None
    if not smallest_only:
        ample = _in_budget(subject, column, AMPLE_NBYTES)
        if ample is None:
            return None
    values = in_the_smallest(partial(_in_budget, subject, column))
    if values is not None and ample is not None and (text := difference(values, ample, same_bits)) is not None:
        raise Differs(f"under another budget, {text}")
    return values


def _in_budget(subject: Subject, column: Column, budget_nbytes: int) -> Values | None:
    fresh()
    compile_it = compiled_for(budget_nbytes, column.codegen)
    values, called = train(subject.sample, column, compile_it, subject.optimizer)
    sessions = sessions_of(called.parameters())
    if not any(session.records.latest for session in sessions):
        return None
    for session in sessions:
        _check_bytes(session, budget_nbytes)
    return values


def _check_bytes(session: Session, budget_nbytes: int) -> None:
    """Compare the peak of all steps and the moments of the latest, without tensors of the program that no plan has.

    Raises:
        _TooLow: one is more than predicted, or the prediction more than the budget.
    """
    records = session.records
    if records.predicted_peak_nbytes > budget_nbytes:
        raise _TooLow(f"{records.predicted_peak_nbytes:,} bytes are predicted, beyond the budget")
    peaks = [("peak", records.predicted_peak_nbytes, records.planned_peak_nbytes or 0)]
    for phase, record in records.latest.items():
        measurement = record.measurement
        planned = {m.name: m.nbytes for part in record.plan.phases if part.phase == phase for m in part.moments}
        for name, measured in measurement.peaks:
            if measured is not None and name in planned:
                peaks.append((name, planned[name], measured - measurement.unplanned_nbytes))
    for name, predicted, measured in peaks:
        if measured > predicted:
            raise _TooLow(f"{name}: measured {measured:,} bytes, predicted {predicted:,}")
