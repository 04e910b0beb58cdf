"""What loops of all kinds do on ranks; run as `rank_cases` is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).parent))

import rank_cases
from rank_cases import (
    HUGE,
    VOCABULARY,
    WIDTH,
    Block,
    arrays,
    batches,
    bits,
    check_close,
    check_weights,
    compiled,
    mean,
    mesh,
    own,
    take_step,
)

import chunkc

PLACES = ((3, HUGE), (3, None), (1, HUGE))
"""Stages of ZeRO, with budgets; None is the smallest that the run before has found."""
BUDGETS, IN_STAGES = PLACES[:2], PLACES[::2]


class Small(nn.Module):
    """Quickly compiled; a matrix is tied, one has fewer rows than there are ranks, one is never used, and most are in a
    block that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(checkpoint(self.block, self.embed(tokens), use_reentrant=False))
        return nn.functional.cross_entropy(logits.flatten(0, 1), (tokens.flatten() + 1) % VOCABULARY)


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small()


def as_one_process(make: Callable[[nn.Module], Any], train: Callable[..., list[float]], places: Any = PLACES) -> None:
    """Train in one process, and on the ranks in every place."""
    reference: Any = small()
    expected = train(reference, reference, make(reference), lambda batch: batch, lambda loss: loss.item())
    weights, least, found = arrays(reference), HUGE, set()
    for stage, budget in places:
        torch._dynamo.reset()
        model: Any = chunkc.distribute(small(), mesh(), zero_stage=stage)
        losses = train(compiled(model, budget or least), model, make(model), own, mean)
        chunkc.synchronize(model)
        least = chunkc.report(model).minimum_budget_nbytes
        check_close(losses, expected, relative=1e-6)
        check_weights(model, weights)
        found.add(bits(model))
    assert len(found) == 1, "a budget or a stage changed the result"


def change_on_one(model: nn.Module, part: Any, value: float) -> None:
    """Set the last row of a gradient: on ranks, in the part of the last one alone."""
    if part is not own or dist.get_rank() == dist.get_world_size() - 1:
        gradient: Any = model.embed.weight.grad  # type: ignore[union-attr]
        (gradient.to_local() if part is own else gradient)[-1] = value


def plain_steps(run: Any, model: nn.Module, optimizer: Any, part: Any, whole: Any) -> list[float]:
    """One backward in each step, and nothing that looks at gradients."""
    losses = []
    for step in range(3):
        loss = run(part(batches(step)[0]))
        take_step(loss, optimizer)
        losses.append(whole(loss))
    return losses


def clipped_steps(run: Any, model: nn.Module, optimizer: Any, part: Any, whole: Any) -> list[float]:
    losses = []
    for step in range(3):
        for batch in batches(step):
            loss = run(part(batch)) / 2
            loss.backward()
            losses.append(whole(loss))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def scaled_steps(run: Any, model: nn.Module, optimizer: Any, part: Any, whole: Any) -> list[float]:
    """With a GradScaler, and clipping. In a step a gradient overflows, on ranks in the part of the last one alone."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    found = []
    for step in range(4):
        loss = run(part(batches(step)[0]))
        scaler.scale(loss).backward()
        if step != 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            change_on_one(model, part, torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [whole(loss), scaler.get_scale() / 2**20]
    return found


def scaled_and_clipped_in_the_step(run: Any, model: nn.Module, optimizer: Any, part: Any, whole: Any) -> list[float]:
    """The same by chunkc's own, which read no gradient twice. All ranks know one norm."""
    scaler = chunkc.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    found = []
    for step in range(4):
        loss = run(part(batches(step)[0]))
        scaler.scale(loss).backward()
        if step == 2:
            change_on_one(model, part, torch.inf)
        norm = float(scaler.clip_grad_norm_(optimizer, 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [whole(loss), scaler.get_scale() / 2**20, norm if step != 2 else float(norm == torch.inf)]
    return found


def undone_steps(run: Any, model: nn.Module, optimizer: Any, part: Any, whole: Any) -> list[float]:
    """What the second backward updates is undone by the norm; what the last one does, by the last rank alone."""
    found = []
    for step in range(6):
        loss = run(part(batches(step)[0]))
        loss.backward()
        if step == 5:
            change_on_one(model, part, 0.0)
        found += [whole(loss), float(optimizer.clip_grad_norm_(0.1 if step == 1 else 1e6))]
        optimizer.step()
        optimizer.zero_grad()
    return found


def loop(
    steps: Callable[..., list[float]], places: Any = PLACES, kind: str = "AdamW", **options: Any
) -> Callable[[], None]:
    """A case: an optimizer's steps in these places."""

    def make(model: nn.Module) -> Any:
        return getattr(chunkc.optim, kind)(model.parameters(), lr=1e-2, eps=1e-3, **options)

    return lambda: as_one_process(make, steps, places)


CASES: dict[str, Callable[[], None]] = {
    "scaler": loop(scaled_steps),
    "scaler in step": loop(scaled_and_clipped_in_the_step, BUDGETS),
    "lamb": loop(clipped_steps, kind="LAMB"),
    "lamb beside": loop(plain_steps, IN_STAGES, "LAMB", update_on="cpu", overlap="both"),
    "forward": loop(clipped_steps, IN_STAGES, update_on="cpu", overlap="forward"),
    "both": loop(plain_steps, BUDGETS, update_on="cpu", overlap="both"),
    "backward": loop(plain_steps, BUDGETS, update_on="device", overlap="backward"),
    "undone": loop(undone_steps, BUDGETS, update_on="cpu", overlap="backward", undoable=True),
}

if __name__ == "__main__":
    rank_cases.run_command_line(CASES)
