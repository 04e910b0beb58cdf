"""Training on a device that fails in the middle: what is left, and what can be done again. With arithmetic."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache

import cuda_in_ram
import pytest
import torch
from device_gpt import GPT, smallest_budget
from torch import Tensor

import chunkc
from chunkc.runtime.storage import pinned

pytestmark = pytest.mark.arithmetic

HUGE = 1 << 34
SHAPE = {"width": 128, "layers": 3, "heads": 2, "vocab": 2048, "sequence": 128}
BATCH, NUM_STEPS = 4, 3
MIB = 1 << 20


@cache
def budget_nbytes() -> int:
    return smallest_budget(SHAPE, torch.float32, batch=BATCH)


@pytest.fixture
def all_memory() -> Iterator[Callable[[], None]]:
    """Gives the device all of its memory back; at the end, too."""
    total_nbytes = cuda_in_ram.setting("memory")

    def give_back() -> None:
        cuda_in_ram.configure(memory=total_nbytes)

    yield give_back
    give_back()


def leave(nbytes: int) -> None:
    """Let the device have so many bytes more than are in use, and no other."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_nbytes, total_nbytes = torch.cuda.mem_get_info()
    cuda_in_ram.configure(memory=total_nbytes - free_nbytes + nbytes)


def train(
    budget_nbytes: int, before: Callable[[str, int], None], after_error: Callable[[], None]
) -> tuple[list[Tensor], list[Tensor], int]:
    """Losses, weights, and how often a step was done again. `before` is called with a phase and a step's number."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = chunkc.place(GPT(**SHAPE), device="cuda")
    options = {"memory_budget": budget_nbytes, "codegen": "eager", "whole_graph": "never"}
    compiled = torch.compile(model, backend="chunkc", options=options)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[Tensor] = []
    num_repeated = 0
    while len(losses) < NUM_STEPS:
        generator = torch.Generator().manual_seed(len(losses))
        tokens = torch.randint(SHAPE["vocab"], (BATCH, SHAPE["sequence"]), generator=generator).to("cuda")
        loss = None
        try:
            before("forward", len(losses))
            loss = compiled(tokens)
            before("backward", len(losses))
            loss.backward()
        except torch.OutOfMemoryError:
            after_error()
            optimizer.zero_grad()
            num_repeated += 1
            continue
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu().clone())
    chunkc.synchronize(model)
    return losses, [p.detach().cpu().clone() for p in model.parameters()], num_repeated


@cache
def undisturbed() -> tuple[list[Tensor], list[Tensor], int]:
    return train(HUGE, lambda *_: None, lambda: None)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("nbytes", [0, 4 * MIB], ids=["at once", "later"])
def test_a_step_that_ran_out_of_memory_can_be_done_again(
    phase: str, nbytes: int, all_memory: Callable[[], None]
) -> None:
    """As where others take memory on the device for a while. Copies that are under way then are late."""
    failing = {(phase, 1)}

    def before(phase: str, step: int) -> None:
        if (phase, step) in failing:
            failing.clear()
            leave(nbytes)

    with cuda_in_ram.choose(late=1):
        losses, weights, num_repeated = train(budget_nbytes(), before, all_memory)
    assert num_repeated == 1
    assert all(map(torch.equal, losses, undisturbed()[0]))
    assert all(map(torch.equal, weights, undisturbed()[1]))


@pytest.mark.parametrize("which", [1, 3, "last"])
def test_a_model_whose_memory_could_not_all_be_pinned_stays_as_it_was(which: int | str) -> None:
    torch.manual_seed(0)
    if which == "last":
        before = set(pinned._alive)
        placed = chunkc.place(GPT(**SHAPE), device="cuda")
        which = len(set(pinned._alive) - before)
        assert which > 3
        del placed
    model = GPT(**SHAPE)
    expected = [p.detach().clone() for p in model.parameters()]
    with cuda_in_ram.choose(fail_register=which), pytest.raises(chunkc.HomeError, match="cannot pin"):
        chunkc.place(model, device="cuda")
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert all(map(torch.equal, model.parameters(), expected))
    chunkc.place(model, device="cuda")
    assert {p.device.type for p in model.parameters()} == {"cuda"}
