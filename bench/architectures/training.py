"""Train an architecture once: its losses, and whether it generates, is saved and loaded as in PyTorch."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch._inductor.compile_fx
from judging.budgets import Compile, Differs
from torch import Tensor, nn

import chunkc
import chunkc.backend
from architectures.models import BATCH, LENGTH, Subject, loss_of
from architectures.table import Column
from chunkc.session.session import sessions_of

NUM_STEPS, NUM_STEPS_AFTER = 3, 2
"""Training steps before the evaluation, and after it."""

TOLERANCE, LOOSE_TOLERANCE = 1e-3, 1e-2
"""Of losses, relative to plain PyTorch's: in fp32; and in mixed precision, where the default backend may be as far."""

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Losses:
    """Losses of a run: losses of the steps, and of the evaluation between them; None where that was left out."""

    steps: tuple[float, ...]
    evaluation: float | None

    def paired_with(self, other: Losses) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Pair the losses that both runs have."""
        count = min(len(self.steps), len(other.steps))
        mine, others = list(self.steps[:count]), list(other.steps[:count])
        if self.evaluation is not None and other.evaluation is not None:
            mine, others = [*mine, self.evaluation], [*others, other.evaluation]
        return tuple(mine), tuple(others)


@dataclass(frozen=True)
class Trained:
    """`peak_nbytes`: measured while it trained and was evaluated; None if not measured."""

    losses: Losses
    peak_nbytes: int | None


class Progress:
    """Stage that a run has reached, for the message."""

    def __init__(self) -> None:
        self.now = "building"


def _seed(seed: int) -> None:
    """Seed all generators: some models draw masks with NumPy's."""
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


def _optimizer(model: nn.Module, column: Column, *, plain: bool) -> torch.optim.Optimizer:
    """Make the optimizer: PyTorch's for the reference in fp32, else chunkc's.

    In low precision the reference has chunkc's, too: losses depend on its master weights.
    """
    if plain and column.weights == torch.float32:
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    return chunkc.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)


def run(
    subject: Subject,
    column: Column,
    progress: Progress,
    compiled_by: Compile | None,
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
        with column.precision():
            loss = loss_of(called(**batch))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    for number in range(NUM_STEPS):
        progress.now = f"step {number}"
        step(number)
    evaluation = None
    if whole:
        progress.now = "evaluation"
        evaluation = _evaluated(subject, column, called)
        for number in range(NUM_STEPS, NUM_STEPS + NUM_STEPS_AFTER):
            progress.now = f"step {number}, after the evaluation"
            step(number)
    peak_nbytes = chunkc.report(called).measured_peak_nbytes if sessions_of(called.parameters()) else None
    if whole and hasattr(called, "generate") and getattr(model, "can_generate", lambda: False)():
        progress.now = "generate"
        _generate(subject, column, called, model)
    if whole:
        progress.now = "state_dict"
        _saved_and_loaded(subject, column, model, called)
    progress.now = "comparison"
    return Trained(Losses(tuple(losses), evaluation), peak_nbytes), called


def _evaluated(subject: Subject, column: Column, called: nn.Module) -> float:
    called.eval()
    batch = _batch(subject, column, 77, BATCH // 2, LENGTH * 3 // 4)
    _seed(77)
    with torch.no_grad(), column.precision():
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
    check_close(column, [found], [expected], "the loss of the loaded model")


def check_close(column: Column, found: Sequence[float], expected: Sequence[float], what: str) -> None:
    tolerance = TOLERANCE if column.is_exact else 3 * LOOSE_TOLERANCE
    worst = distance(found, expected)
    if not worst <= tolerance:
        raise Differs(f"{what}: {worst:.2g} from plain PyTorch's, relatively")


def distance(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; infinite where only one is a number."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one != one and other != other:
            continue
        worst = max(worst, abs(one - other) / max(abs(other), 1e-2)) if abs(one) < float("inf") else float("inf")
    return worst
