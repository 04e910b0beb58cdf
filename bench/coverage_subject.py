"""Trains one architecture after the other for `coverage.py`, each in a process of its own with a time limit.

    python bench/coverage_subject.py '{"time_limit_s": 300}'

A line on standard input names an architecture and its columns; the answer has a cell for each. The libraries are
imported once, and a copy of this process (`os.fork`) does the work: where it dies or hangs, the column it was at has
failed, and another copy goes on with the next.
"""

from __future__ import annotations

import gc
import io
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch._inductor.compile_fx
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
import coverage_models
from coverage_models import BATCH, LENGTH, NotBuilt, Subject, loss_of
from coverage_table import (
    DEFAULT_FAILS,
    FAILED,
    NOT_BUILT,
    PLAIN_FAILS,
    REFUSED,
    TRAINED,
    Cell,
    Column,
)

import chunkc
import chunkc.backend
from chunkc.runtime import cpu_allocator
from chunkc.session import sessions_of

NUM_STEPS, NUM_STEPS_AFTER = 3, 2
"""Training steps before the evaluation, and after it."""

SHARE = 1.3
"""Of the smallest budget."""

MAX_MINIMA = 6
"""How often a model of several graphs may name a larger smallest budget."""

TOLERANCE, LOOSE_TOLERANCE = 1e-3, 1e-2
"""Of losses, relative to plain PyTorch's: in fp32; and in mixed precision, where the default backend may be as far."""

LEARNING_RATE = 1e-3

AMPLE_NBYTES = 1 << 33


@dataclass(frozen=True)
class Losses:
    """What a run gave: losses of the steps, and of the evaluation between them; None where that was left out."""

    steps: tuple[float, ...]
    evaluation: float | None

    def beside(self, other: Losses) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Those that both have."""
        count = min(len(self.steps), len(other.steps))
        mine, others = list(self.steps[:count]), list(other.steps[:count])
        if self.evaluation is not None and other.evaluation is not None:
            mine, others = [*mine, self.evaluation], [*others, other.evaluation]
        return tuple(mine), tuple(others)


@dataclass(frozen=True)
class Trained:
    """`peak_nbytes`: measured while it trained and was evaluated; None where nobody measured."""

    losses: Losses
    peak_nbytes: int | None


class Stage:
    """Where a run has come, for the message."""

    def __init__(self) -> None:
        self.now = "building"


class Differs(Exception):
    """It ran, and the numbers are not what they should be."""


# ---------------------------------------------------------------- one run


def _seed(seed: int) -> None:
    """Of all generators: some models draw masks with NumPy's."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                if "drop" in name.lower() and isinstance(value, float):
                    setattr(holder, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _model(subject: Subject, column: Column) -> nn.Module:
    torch.manual_seed(0)
    model = subject.make()
    if not column.dropout:
        _without_dropout(model)
    if column.checkpointing:
        if hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            model.set_grad_checkpointing(True)  # type: ignore[operator]
    return model.to(column.weights).train()


def _batch(subject: Subject, column: Column, seed: int, size: int, length: int) -> dict[str, Any]:
    torch.manual_seed(1000 + seed)
    batch = subject.batch(size, length)
    return {k: v.to(column.weights) if v.is_floating_point() else v for k, v in batch.items()}


def _precision(column: Column) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", column.autocast) if column.autocast is not None else nullcontext()


def _optimizer(model: nn.Module, column: Column, *, plain: bool) -> torch.optim.Optimizer:
    """In fp32 the reference has PyTorch's; in low precision masters decide how losses go on, so all have chunkc's."""
    if plain and column.weights == torch.float32:
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    return chunkc.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)


def _run(
    subject: Subject,
    column: Column,
    stage: Stage,
    compiled_by: Callable[[nn.Module], nn.Module] | None,
    *,
    whole: bool,
) -> tuple[Trained, nn.Module]:
    """Three steps; `whole`: also an evaluation of another size, two steps more, `generate` and the `state_dict`.

    Returns what came out, and what was called.
    """
    model = _model(subject, column)
    called = model if compiled_by is None else compiled_by(model)
    optimizer = _optimizer(model, column, plain=compiled_by is None)
    scaler = torch.amp.GradScaler("cpu", enabled=column.scaled)
    losses: list[float] = []

    def step(number: int) -> None:
        batch = _batch(subject, column, number, BATCH, LENGTH)
        _seed(number)
        with _precision(column):
            loss = loss_of(called(**batch))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    for number in range(NUM_STEPS):
        stage.now = f"step {number}"
        step(number)
    evaluation = None
    if whole:
        stage.now = "evaluation"
        evaluation = _evaluated(subject, column, called)
        for number in range(NUM_STEPS, NUM_STEPS + NUM_STEPS_AFTER):
            stage.now = f"step {number}, after the evaluation"
            step(number)
    peak_nbytes = chunkc.report(called).measured_peak_nbytes if sessions_of(called.parameters()) else None
    if whole and hasattr(called, "generate") and getattr(model, "can_generate", lambda: False)():
        stage.now = "generate"
        _generate(subject, column, called, model)
    if whole:
        stage.now = "state_dict"
        _saved_and_loaded(subject, column, model, called)
    stage.now = "comparison"
    return Trained(Losses(tuple(losses), evaluation), peak_nbytes), called


def _evaluated(subject: Subject, column: Column, called: nn.Module) -> float:
    called.eval()
    batch = _batch(subject, column, 77, BATCH // 2, LENGTH * 3 // 4)
    _seed(77)
    with torch.no_grad(), _precision(column):
        loss = float(loss_of(called(**batch)))
    called.train()
    return loss


def _generate(subject: Subject, column: Column, called: nn.Module, model: nn.Module) -> None:
    batch = _batch(subject, column, 78, 2, LENGTH // 2)
    given = {key: value for key, value in batch.items() if key in ("input_ids", "input_features", "input_values")}
    given |= {"pixel_values": batch["pixel_values"]} if "pixel_values" in batch and "input_ids" not in batch else {}
    plain = _model(subject, column)
    plain.load_state_dict(model.state_dict())
    options = {"max_new_tokens": 3, "do_sample": False}
    try:
        with torch.no_grad():
            expected = plain.eval().generate(**given, **options)  # type: ignore[operator]
    except Exception:
        return  # nor does plain PyTorch generate from this
    called.eval()
    with torch.no_grad():
        found = called.generate(**given, **options)  # type: ignore[operator]
    called.train()
    if isinstance(expected, Tensor) and not torch.equal(found, expected):
        raise Differs("generate gives other words than the same weights in plain PyTorch")


def _saved_and_loaded(subject: Subject, column: Column, model: nn.Module, called: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    plain = _model(subject, column)
    plain.load_state_dict(loaded)
    own = dict(model.state_dict())
    for name, value in plain.state_dict().items():
        if not torch.equal(value.nan_to_num() if value.is_floating_point() else value, own[name].nan_to_num()
                           if value.is_floating_point() else own[name]):  # fmt: skip
            raise Differs(f"{name} is not what was saved")
    model.load_state_dict(loaded)
    expected, found = _evaluated(subject, column, plain), _evaluated(subject, column, called)
    _check_close(column, [found], [expected], "the loss of the loaded model")


def _check_close(column: Column, found: Sequence[float], expected: Sequence[float], what: str) -> None:
    tolerance = TOLERANCE if column.is_exact else 3 * LOOSE_TOLERANCE
    worst = _distance(found, expected)
    if not worst <= tolerance:
        raise Differs(f"{what}: {worst:.2g} from plain PyTorch's, relatively")


def _distance(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; infinite where only one is a number."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one != one and other != other:
            continue
        worst = max(worst, abs(one - other) / max(abs(other), 1e-2)) if abs(one) < float("inf") else float("inf")
    return worst


# ---------------------------------------------------------------- who compiles


def _by_default(model: nn.Module) -> nn.Module:
    return torch.compile(model)  # type: ignore[return-value]


def _by_chunkc(column: Column, budget_nbytes: int) -> Callable[[nn.Module], nn.Module]:
    options = {"memory_budget": budget_nbytes, "codegen": column.codegen, "whole_graph": "never"}
    return lambda model: torch.compile(model, backend="chunkc", options=options)  # type: ignore[return-value]


def _fresh() -> None:
    torch._dynamo.reset()
    gc.collect()


def _in_ample_room(subject: Subject, column: Column, stage: Stage) -> tuple[Trained, int | None]:
    """Steps alone where everything fits, and the smallest budget; None where Dynamo compiled nothing."""
    _fresh()
    trained, called = _run(subject, column, stage, _by_chunkc(column, AMPLE_NBYTES), whole=False)
    if not sessions_of(called.parameters()):
        return trained, None
    return trained, chunkc.report(called).minimum_budget_nbytes


def _near_the_minimum(subject: Subject, column: Column, stage: Stage, minimum_nbytes: int) -> tuple[Trained, int, int]:
    """What chunkc trains, the smallest budget that it named last, and the bytes by which it exceeded its budget."""
    for _ in range(MAX_MINIMA):
        budget_nbytes = int(SHARE * minimum_nbytes)
        _fresh()
        foreign_nbytes = cpu_allocator.current_nbytes()
        try:
            trained, _ = _run(subject, column, stage, _by_chunkc(column, budget_nbytes), whole=True)
        except chunkc.BudgetError as error:
            if error.minimum_nbytes <= minimum_nbytes:
                raise
            minimum_nbytes = error.minimum_nbytes
            continue
        peak_nbytes = (trained.peak_nbytes or 0) - foreign_nbytes
        return trained, minimum_nbytes, max(0, peak_nbytes - budget_nbytes)
    raise Differs(f"{MAX_MINIMA} times in a row the smallest budget was not enough")


# ---------------------------------------------------------------- one cell


class Judge:
    """The cells of one architecture; what plain PyTorch does is computed once for all columns that share it."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._plain: dict[Column, Trained | str] = {}
        self._default: dict[Column, Trained | str] = {}

    def cell(self, column: Column) -> Cell:
        """What becomes of a column."""
        started_s, stage = time.monotonic(), Stage()
        if column.checkpointing and not self._subject.supports_checkpointing:
            return Cell(PLAIN_FAILS, "", "it has no gradient checkpointing")
        plain = self._by_plain(column)
        if isinstance(plain, str):
            return Cell(PLAIN_FAILS, "", plain)
        try:
            note = self._check(column, plain, stage)
            found = Cell(TRAINED, "", note)
        except Exception as error:
            traceback.print_exc()
            outcome = REFUSED if isinstance(error, chunkc.ChunkcError) else FAILED
            default = self._by_default(column)
            if isinstance(default, str):
                found = Cell(DEFAULT_FAILS, stage.now, f"{_message(error)} | default backend: {default}")
            else:
                found = Cell(outcome, stage.now, _message(error))
        return Cell(found.outcome, found.stage, found.message, round(time.monotonic() - started_s, 1))

    def _by_plain(self, column: Column) -> Trained | str:
        key = column.with_codegen("")
        if key not in self._plain:
            try:
                _fresh()
                self._plain[key] = _run(self._subject, column, Stage(), None, whole=True)[0]
            except Exception as error:
                self._plain[key] = _message(error)
        return self._plain[key]

    def _by_default(self, column: Column) -> Trained | str:
        key = column.with_codegen("")
        if key not in self._default:
            stage = Stage()
            try:
                _fresh()
                found = _run(self._subject, column, stage, _by_default, whole=True)[0]
                plain = self._by_plain(column)
                assert isinstance(plain, Trained)
                if column.is_exact and not column.dropout:
                    _check_close(column, *found.losses.beside(plain.losses), "losses")
                self._default[key] = found
            except Exception as error:
                self._default[key] = f"{stage.now}: {_message(error)}"
        return self._default[key]

    def _check(self, column: Column, plain: Trained, stage: Stage) -> str:
        subject = self._subject
        ample, minimum = _in_ample_room(subject, column, stage)
        if not column.dropout:
            self._check_losses(column, ample, plain)
        if minimum is None:
            return "nothing was compiled: Dynamo leaves all of it to eager PyTorch"
        trained, known, excess = _near_the_minimum(subject, column, stage, minimum)
        if not column.dropout:
            self._check_losses(column, trained, plain)
        if not _same_bits(trained.losses.steps[:NUM_STEPS], ample.losses.steps):
            raise Differs("losses have other bits under another budget")
        if excess:
            raise Differs(f"measured {excess:,} bytes beyond the budget")
        return "" if known == minimum else f"the smallest budget grew by {known / minimum - 1:.1%} after the first"

    def _check_losses(self, column: Column, trained: Trained, plain: Trained) -> None:
        if column.is_exact:
            _check_close(column, *trained.losses.beside(plain.losses), "losses")
            return
        far = _distance(*trained.losses.beside(plain.losses))
        if far <= LOOSE_TOLERANCE:
            return
        default = self._by_default(column)
        if isinstance(default, str):
            raise Differs(f"losses: {far:.2g} from plain PyTorch's, relatively")
        other = _distance(*default.losses.beside(plain.losses))
        if not far <= max(3 * other, LOOSE_TOLERANCE):
            raise Differs(f"losses: {far:.2g} from plain PyTorch's, relatively; the default backend's {other:.2g}")


def _same_bits(left: Sequence[float], right: Sequence[float]) -> bool:
    return all(a == b or (a != a and b != b) for a, b in zip(left, right, strict=True))


def _message(error: BaseException) -> str:
    """Type, first lines and the innermost frame that is not PyTorch's own plumbing, on one line."""
    text = " ".join(str(error).split())[:300]
    frames = traceback.extract_tb(error.__traceback__)
    last = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{last}"


# ---------------------------------------------------------------- processes


def _cells(name: str, columns: Sequence[Column]) -> Iterator[dict[str, Any]]:
    """One after the other, as they come."""
    try:
        subject = coverage_models.build(name)
    except NotBuilt as error:
        for column in columns:
            yield {"column": column.name, **asdict(Cell(NOT_BUILT, "", str(error)))}
        return
    yield {"num_parameters": subject.num_parameters}
    judge = Judge(subject)
    for column in columns:
        yield {"column": column.name, **asdict(judge.cell(column))}


def _answer(name: str, columns: Sequence[Column], time_limit_s: float) -> dict[str, Any]:
    """The cells of an architecture; columns whose process died or took too long have failed."""
    cells: dict[str, Any] = {}
    answer: dict[str, Any] = {"architecture": name, "num_parameters": None, "cells": cells}
    left = list(columns)
    while left:
        ended = "it took too long"
        with _Copy(name, left) as copy:
            while left and (line := copy.line(time_limit_s)) is not None:
                if not line:
                    ended = copy.how_it_ended()
                    break
                part = json.loads(line)
                if "num_parameters" in part:
                    answer["num_parameters"] = part["num_parameters"]
                    continue
                cells[part.pop("column")] = part
                left.pop(0)
        if left:
            cells[left.pop(0).name] = asdict(Cell(FAILED, "", ended))
    return answer


class _Copy:
    """A copy of this process at work on an architecture; a context manager that ends it."""

    def __init__(self, name: str, columns: Sequence[Column]) -> None:
        self._read, write = os.pipe()
        self._unread = b""
        self._status: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._read)
            _work(name, columns, write)
        os.close(write)

    def line(self, time_limit_s: float) -> str | None:
        """The next line; empty where there is none any more, None where it took too long."""
        give_up_s = time.monotonic() + time_limit_s
        while b"\n" not in self._unread:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or not select.select([self._read], [], [], left_s)[0]:
                return None
            part = os.read(self._read, 1 << 16)
            if not part:
                return ""
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def how_it_ended(self) -> str:
        _, self._status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(self._status)
        return f"the process was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"

    def __enter__(self) -> _Copy:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._read)
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _work(name: str, columns: Sequence[Column], write: int) -> None:
    """What a copy does; it does not return."""
    code = 1
    try:
        with os.fdopen(write, "w", buffering=1) as lines:
            for part in _cells(name, columns):
                print(json.dumps(part), file=lines)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _main() -> None:
    # Only answers go to the pipe; what anybody else prints goes to standard error.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch._inductor.config.compile_threads = 1
    cpu_allocator.install()
    gc.collect()
    gc.freeze()
    print(json.dumps({"architectures": coverage_models.architectures()}), file=lines)
    for line in sys.stdin:
        asked = json.loads(line)
        columns = [Column.named(name) for name in asked["columns"]]
        print(json.dumps(_answer(asked["architecture"], columns, settings["time_limit_s"])), file=lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="chunkc-coverage-") as _folder:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", _folder)
        _main()
