"""Updates that begin in a backward: which forwards still wait for theirs, as each optimizer counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import array, differences, home_of, session_of
from overlap_cases import Subject, case, minimum_nbytes, subject

import chunkc
from chunkc.ir.layout import Chunk
from chunkc.ir.plan import Tile
from chunkc.session.in_backward import UpdatesInBackward

pytestmark = pytest.mark.timeout(120)


STORE: Any = SimpleNamespace(gradients=SimpleNamespace(check_not_consumed=lambda group: None))


class Starter:
    """Begins the update of whatever it is told of."""

    def __init__(self) -> None:
        self.updated: list[int] = []

    def begin_update(self, group: int) -> None:
        self.updated.append(group)

    undoable, begun = False, frozenset[int]()

    def take_back(self, groups: Any) -> None:
        """Nothing of it can be undone."""

    def stages_in_slots(self, group: int) -> int:
        return 2 if group == 7 else 0

    def updating(self, group: int, tiles: Sequence[Tile]) -> Callable[[Tile], None]:
        self.updated.append(group)
        return lambda tile: self.updated.append(tile.begin)


@pytest.fixture
def pair() -> tuple[UpdatesInBackward, Starter, Starter]:
    early, first, second = UpdatesInBackward(STORE), Starter(), Starter()
    early.join(first)
    early.join(second)
    return early, first, second


def run_backward(early: UpdatesInBackward, group: int) -> None:
    early.enter_backward([group])
    early.gradients_complete(group)


def run_forward(early: UpdatesInBackward, group: int) -> None:
    early.enter_forward([group])
    early.leave_forward([group])


def test_a_step_ends_what_its_own_optimizer_waits_for(pair: tuple[UpdatesInBackward, Starter, Starter]) -> None:
    early, first, second = pair
    for _ in range(3):
        run_forward(early, 0)
    run_backward(early, 0)
    early.stepped(first)
    run_backward(early, 0)  # for the second, one of three forwards is without its backward
    assert (first.updated, second.updated) == ([0], [])


def test_an_optimizer_that_is_gone_is_not_counted_for(pair: tuple[UpdatesInBackward, Starter, Starter]) -> None:
    early, first, _ = pair
    del pair
    run_forward(early, 0)
    run_forward(early, 0)
    early.stepped(first)
    run_forward(early, 0)
    run_backward(early, 0)
    assert first.updated == [0]


def test_one_that_joins_in_a_step_waits_for_the_forwards_before(
    pair: tuple[UpdatesInBackward, Starter, Starter],
) -> None:
    early, *_ = pair
    run_forward(early, 0)
    early.join(late := Starter())
    run_forward(early, 0)
    run_backward(early, 0)
    assert late.updated == []
    run_backward(early, 0)
    assert late.updated == [0]


class Halves(torch.nn.Module):
    """Two graphs with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(4))

    def first(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def second(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).square().mean()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kib", [100, 276], ids=["all moves", "all stays, some without gradients"])
def test_an_optimizer_made_between_two_graphs_trains(kib: int) -> None:
    def train(overlap: str) -> list[Any]:
        torch.manual_seed(0)
        model = Halves()
        options = {"memory_budget": kib * 1024, "codegen": "eager", "whole_graph": "never", "chunk_size": 16384}
        first, second = (torch.compile(f, backend="chunkc", options=options) for f in (model.first, model.second))
        optimizer = None
        for step in range(3):
            hidden = first(torch.full((2, 64), 0.1 * (step + 1)))
            if optimizer is None:
                optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-2, overlap=overlap, update_on="device")
            second(hidden).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [array(p) for p in model.parameters()]

    assert not differences(train("backward"), train("none"))


def test_a_group_is_updated_in_slots_once_no_other_backward_is_to_come(
    pair: tuple[UpdatesInBackward, Starter, Starter],
) -> None:
    early, first, second = pair
    assert early.updates_in_slots([3, 7]) == ((7, 2),)  # asked in the forward
    run_forward(early, 7)
    run_forward(early, 7)
    early.enter_backward([7])
    assert early.updates_in_slots([3, 7]) == ()
    early.enter_backward([7])
    assert early.updates_in_slots([3, 7]) == ((7, 2),)
    tile = Tile(7, 64, 128, 0, 2)
    early.updating([tile])(tile)
    assert sorted([first.updated, second.updated]) == [[], [7, 64]]


def under_way(models: list[torch.nn.Module]) -> list[int]:
    """How many of each model's chunks are being updated, or have been since anybody asked."""
    found = []
    for model in models:
        store = session_of(model).store
        names = [home_of(parameter)[1] for parameter in model.parameters()]
        groups = {store.views.group_index(name) for name in names if store.views.is_managed(name)}
        found.append(len(groups & store.updates._pending.keys()))
    return found


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_step_of_one_model_leaves_the_forwards_of_another_counted() -> None:
    """Two models in one session: of two forwards before a backward, the first backward begins no update."""

    def train(mode: str) -> list[Any]:
        of = case()
        nbytes = minimum_nbytes(of) + 32768
        options: Any = {"memory_budget": nbytes, "codegen": "eager", "whole_graph": "never"}
        torch.manual_seed(0)
        models = [of.build(), of.build()]
        compiled = [torch.compile(model, backend="chunkc", options=options) for model in models]
        made = [chunkc.optim.AdamW(m.parameters(), lr=1e-2, update_on="cpu", overlap=mode) for m in models]
        for index in range(2):
            compiled[index](**of.batch(0)).backward()
            made[index].step()
            made[index].zero_grad()
        losses = [compiled[0](**of.batch(1)), compiled[1](**of.batch(1)), compiled[1](**of.batch(2))]
        losses[0].backward()
        assert mode == "none" or under_way(models) == [4, 0]
        made[0].step()
        losses[1].backward()
        assert under_way(models)[1] == 0
        losses[2].backward()
        assert mode == "none" or under_way(models)[1] == 4
        made[1].step()
        return [array(p) for model in models for p in model.parameters()]

    assert not differences(train("backward"), train("none"))


def fail_once(made: Subject, patch: pytest.MonkeyPatch) -> None:
    """The next chunk that is fetched is not."""
    fetch = made.store.prefetch

    def fail(chunk: Chunk, link: str) -> None:
        patch.setattr(made.store, "prefetch", fetch)
        raise chunkc.HomeError("the disk is gone")

    patch.setattr(made.store, "prefetch", fail)


def test_a_forward_that_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = subject("backward")
    made.train(range(1), reading=False)
    fail_once(made, monkeypatch)
    with pytest.raises(chunkc.HomeError):
        made.compiled(**made.case.batch(1))
    made.backward(1)
    assert made.num_under_way == 4
    made.optimizer.step()


def test_a_forward_whose_plan_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = subject("backward")
    made.train(range(1), reading=False)
    kept = torch.zeros(1 << 20)
    made.session.live.watch([kept])
    with pytest.raises(chunkc.BudgetError):
        made.compiled(**made.case.batch(1))
    del kept
    made.backward(1)
    assert made.num_under_way == 4
    made.optimizer.step()
