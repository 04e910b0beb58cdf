"""Gradients that updates in the backward use up never go home, and have no room there; all others have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import differences, session_of
from slot_cases import Subject, trained
from torch import Tensor, nn

import chunkc
from chunkc.ir.errors import HomeError
from chunkc.ir.explanation import Explanation
from chunkc.ir.layout import GRAD, Chunk
from chunkc.runtime.storage.homes import MemoryHome
from chunkc.runtime.store.consumed_gradients import ConsumedGradient


def without_room(made: Subject) -> set[int]:
    """Groups that move, and whose gradients have no room at home."""
    return {index for index in made.moving if made.store.arena.is_promised(Chunk(GRAD, index))}


def explained(made: Subject, **updates: Any) -> Explanation:
    with torch.device("meta"):
        model = made.case.build()
    return chunkc.explain(
        model, **{k: v.to("meta") for k, v in made.case.batch(0).items()}, activations="keep", whole_graph="never",
        memory_budget=made.session.budget_nbytes, chunk_size=made.store.layout.chunk_nbytes, **updates,
    )  # fmt: skip


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_what_is_explained_is_what_is_at_home(overlap: str) -> None:
    _, made = trained(overlap, num_steps=2, codegen="eager")
    assert without_room(made) == (made.moving if overlap == "backward" else set())
    assert explained(made, overlap=overlap).home_nbytes == made.store.arena.nbytes


def test_a_budget_too_small_for_updates_sends_gradients_home() -> None:
    _, made = trained("backward", 0, num_steps=2, codegen="eager")
    assert not made.used
    assert without_room(made) == set()
    assert explained(made, overlap="backward").home_nbytes == made.store.arena.nbytes


def test_they_have_room_from_the_first_backward_that_sends_them_home() -> None:
    made = Subject("backward")
    made.step(0)
    assert without_room(made) == made.moving
    with made.optimizer.accumulating():
        made.backward(1)
    assert without_room(made) == set()
    assert all(p.grad.isfinite().all() for p in made.store.views.parameters().values() if p.grad is not None)


def test_graphs_that_are_compiled_in_the_first_step_update_in_it() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in range(2)]
            self.first, self.second = layers

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x).sum()

    torch.manual_seed(0)
    model, x = Halves(), torch.randn(4, 64)
    options = {"memory_budget": "120KiB", "chunk_size": "20KiB", "codegen": "eager", "whole_graph": "never"}
    compiled = torch.compile(model, backend="chunkc", options=options)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2, overlap="backward")
    compiled(x).backward()
    store = session_of(model).store
    moving = {group.index for group in store.layout.groups} - store.resident
    assert len(moving) > 4
    layers = [*model.first, *model.second]
    assert all(isinstance(layer.weight.grad, ConsumedGradient) for layer in layers)
    assert all(store.arena.is_promised(Chunk(GRAD, index)) for index in moving)
    optimizer.step()
    assert all(int(optimizer.state[layer.weight]["step"]) == 1 for layer in layers)


def test_a_hook_sends_those_of_its_chunk_home() -> None:
    def train(overlap: str) -> tuple[list[Any], Subject]:
        made = Subject(overlap)
        made.step(0)
        name, parameter = next(iter(made.store.views.parameters().items()))
        parameter.register_hook(lambda gradient: gradient * 2)
        losses = [made.step(1), made.step(2)]
        if overlap == "backward":
            assert without_room(made) == made.moving - {made.store.views.group_index(name)}
        return [*losses, *made.state()], made

    assert not differences(train("backward")[0], train("none")[0])


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_without_room_for_them_no_backward_begins(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that is full by then: nothing has run, and with room the next one does."""

    def refuse(*_: object) -> None:
        raise HomeError("no room")

    def train(*, is_full: bool) -> list[Any]:
        made = Subject(overlap)
        with made.optimizer.accumulating():
            loss: Tensor = made.compiled(**made.case.batch(0))
            if is_full:
                with monkeypatch.context() as patch:
                    patch.setattr(MemoryHome, "_map", refuse)
                    with pytest.raises(HomeError, match="no room"):
                        loss.backward()
                assert all(p.grad is None for p in made.model.parameters())
        return [made.step(1), made.step(2), *made.state()]

    assert not differences(train(is_full=True), train(is_full=False))
