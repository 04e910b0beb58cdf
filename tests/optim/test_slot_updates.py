"""`overlap="backward"` on the device: the backward updates chunks in slots, and their gradients go nowhere."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from harness import differences, session_of
from slot_cases import (
    ADAMW,
    WITHOUT_GRADIENTS,
    Subject,
    clip_some,
    explained,
    interrupt_a_backward,
    trained,
    trained_undoably,
    without_room,
)
from torch import Tensor, nn

import chunkc
from chunkc.ir.errors import HomeError
from chunkc.ir.layout import GRAD, Chunk
from chunkc.optim import update_scheduler
from chunkc.runtime.storage.homes import MemoryHome
from chunkc.runtime.store.consumed_gradients import ConsumedGradient

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("undoable", [False, True])
def test_copies_are_those_of_states_and_of_parameters_once(undoable: bool) -> None:
    """In a step, beside the forward's and the backward's own fetches: states both ways, parameters home.

    Gradients go home only where the step may have to undo what it has done; what stands moves no more.
    """
    made = Subject("backward", arguments=ADAMW | ({"undoable": True} if undoable else {}))
    for batch in range(3):
        made.step(batch)
    before = made.moved_nbytes
    made.backward(3)
    in_backward = made.moved_nbytes
    made.optimizer.step()
    assert made.moved_nbytes == in_backward
    groups = made.store.layout.groups
    states = sum(group.nbytes(kind) for group in groups for kind in group.state_kinds)
    assert GRAD in groups[0].update_kinds
    assert in_backward[1] - before[1] == sum(
        group.nbytes(kind) for group in groups for kind in group.update_kinds if undoable or kind != GRAD
    )
    plan = made.session.records.latest["backward"].plan
    fetches = [e for p in plan.phases for stop in p.stops for e in stop if e.kind == "prefetch"]
    assert in_backward[0] - before[0] == states + sum(e.nbytes for e in fetches if e.item.kind == "param")


WHERE = pytest.mark.parametrize("spare_nbytes", [1 << 16, WITHOUT_GRADIENTS], ids=["in slots", "where it stays"])


@WHERE
def test_a_used_gradient_refuses_whoever_needs_it(spare_nbytes: int) -> None:
    made = Subject("backward", spare_nbytes)
    made.step(0)
    made.backward(1)
    weight = made.model.get_parameter("layers.2.weight")
    assert isinstance(weight.grad, ConsumedGradient)
    assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, weight.dtype)
    assert "consumed" in repr(weight.grad)
    refused = [
        lambda: torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1.0),
        lambda: weight.grad.clone(),
        lambda: made.optimizer.zero_grad(set_to_none=False),
        lambda: (weight * 2).sum().backward(),
    ]
    for use in refused:
        with pytest.raises(chunkc.UnsupportedError, match=r"gradient of layers.*was consumed.*zero_grad"):
            use()
    with pytest.raises(chunkc.UnsupportedError, match=r"call optimizer.step\(\) after each backward"):
        made.compiled(**made.case.batch(2))
    made.optimizer.step()
    with pytest.raises(chunkc.UnsupportedError, match=r"gradient of layers.*was consumed"):
        made.optimizer.step()
    with pytest.raises(chunkc.UnsupportedError, match=r"gradient of layers.*was consumed"):
        made.backward(2)
    made.optimizer.zero_grad()
    made.step(2)


def expect_half_done(made: Subject) -> None:
    """Forward and step refuse after an interrupted backward, until its gradients are cleared."""
    with pytest.raises(chunkc.UnsupportedError, match=r"call optimizer.step\(\) after each backward"):
        made.compiled(**made.case.batch(2))
    with pytest.raises(chunkc.StreamError, match=r"interrupted in the backward and is half done"):
        made.optimizer.step()
    made.optimizer.zero_grad()
    made.step(2)


def test_a_backward_that_fails_before_an_update_leaves_it_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four updates one has ended, and one was interrupted between its tiles: the step says so, once."""
    made = Subject("backward")
    made.step(0)
    interrupt_a_backward(made, monkeypatch)
    assert made.store.slots.present == frozenset()
    expect_half_done(made)


# ---------------------------------------------------------------- where all stays but its gradients


def stayed(made: Subject) -> bool:
    """Whether all stays, and the latest backward has updated it."""
    return made.store.resident == made.used == {0, 1, 2, 3}


def test_all_stays_that_moves_else_with_the_same_bits() -> None:
    found, made = trained("backward", WITHOUT_GRADIENTS)
    expected, moving = trained("none", WITHOUT_GRADIENTS)
    assert not differences(found, expected)
    assert moving.moving
    made.backward(4)
    assert stayed(made)
    assert made.moved_nbytes == (0, 0)


def test_where_gradients_have_room_the_step_updates() -> None:
    made = Subject("backward", 1 << 20)
    made.step(0)
    made.backward(1)
    assert (made.store.resident, made.used) == ({0, 1, 2, 3}, set())


def test_it_begins_with_the_first_backward() -> None:
    made = Subject("backward", WITHOUT_GRADIENTS)
    made.backward(0)
    assert stayed(made)


def test_an_update_that_is_interrupted_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Subject("backward", WITHOUT_GRADIENTS)
    made.step(0)
    loss, update, ran = made.compiled(**made.case.batch(1)), update_scheduler.update_in_place, []

    def interrupted(*args: Any) -> None:
        ran.append(args)
        if len(ran) == 2:
            raise KeyboardInterrupt
        update(*args)

    with monkeypatch.context() as patch:
        patch.setattr(update_scheduler, "update_in_place", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    expect_half_done(made)


def test_a_loss_scale_is_refused_and_says_what_has_happened() -> None:
    made = Subject("backward", WITHOUT_GRADIENTS)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loss = made.compiled(**made.case.batch(0))
    scaler.scale(loss).backward()
    with pytest.raises(chunkc.UnsupportedError, match=r"was consumed|load parameters that this backward has updated"):
        scaler.step(made.optimizer)


def test_evaluation_between_steps_sends_nobody_home() -> None:
    made = Subject("backward", WITHOUT_GRADIENTS)
    for batch in range(3):
        made.model.eval()
        with torch.no_grad():
            made.compiled(**made.case.batch(9))
        made.model.train()
        made.step(batch)
    made.backward(3)
    assert stayed(made)


def test_no_slot_is_planned_for_it() -> None:
    made = Subject("backward", WITHOUT_GRADIENTS, codegen="eager")
    made.step(0)
    made.backward(1)
    record = made.session.records.latest["backward"]
    updates = [m for m in record.plan.moments if m.name.startswith("update.")]
    assert [m.slot_nbytes for m in updates] == [0] * 4
    assert all(m.consumed for m in updates)
    assert record.plan.predicted_peak_nbytes <= made.session.budget_nbytes


def test_gradients_of_what_another_thread_trains_are_not_looked_at() -> None:
    made = Subject("backward", WITHOUT_GRADIENTS)
    made.step(0)
    starter, found = made.optimizer.scheduler.in_session(made.session), []

    def ask() -> None:
        found.append([starter.stages_in_slots(group) for group in range(4)])

    ask()
    other = threading.Thread(target=ask)
    other.start()
    other.join()
    assert found == [[1] * 4, [0] * 4]


# ------------------------------------------------------------ consumed gradients have no room at home, all others have


@pytest.mark.parametrize(("overlap", "spare_nbytes"), [("none", 1 << 16), ("backward", 1 << 16), ("backward", 0)])
def test_what_is_explained_is_what_is_at_home(overlap: str, spare_nbytes: int) -> None:
    """Gradients go home where the budget is too small for updates, too."""
    _, made = trained(overlap, spare_nbytes, num_steps=2, codegen="eager")
    assert without_room(made) == (made.moving if overlap == "backward" and spare_nbytes else set())
    assert explained(made, overlap=overlap).home_nbytes == made.store.arena.nbytes


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


# ---------------------------------------------------------------- every rule, budget, code generator and home


IN_ADAM = {"lr": 1e-2, "moments_dtype": "int8", "stochastic_rounding": True}
IN_SGD: dict[str, Any] = {"optimizer": chunkc.optim.SGD, "arguments": {"lr": 1e-2, "momentum": 0.9}}
AT_RANDOM, BF16 = ADAMW | {"stochastic_rounding": True}, torch.bfloat16
CASES: dict[str, dict[str, Any]] = {
    "adamw, bf16, split masters": {"dtype": BF16},
    "adam, 8 bits": {"optimizer": chunkc.optim.Adam, "arguments": IN_ADAM, "dtype": BF16, "spare_nbytes": 20_000},
    "sgd, fp16": IN_SGD | {"dtype": torch.float16},
    "lamb": {"optimizer": chunkc.optim.LAMB, "arguments": {"lr": 1e-2, "weight_decay": 0.1}},
    "no room for updates": {"spare_nbytes": 0},
    "9,000 bytes of room": {"spare_nbytes": 9_000},
    "some stays": {"spare_nbytes": WITHOUT_GRADIENTS},
    "rounded at random, some stays": {"arguments": AT_RANDOM, "dtype": BF16, "spare_nbytes": 120_000},
    "8 bits, some stays": {"arguments": IN_ADAM, "dtype": BF16, "spare_nbytes": 40_000},
    "sgd, some stays": IN_SGD | {"spare_nbytes": 60_000},
    "inductor": {"codegen": "inductor"},
    "disk": {"home": "disk"},
}
ALONE = {("undoable", "lamb"), ("consumed", "some stays")}
"""The first is refused; of the second all stays that moves else, as above."""


@pytest.mark.quick(0, second=12)
@pytest.mark.parametrize(
    ("way", "name"), [(way, name) for way in ("consumed", "undoable") for name in CASES if (way, name) not in ALONE]
)
def test_the_bits_are_those_of_updates_in_the_step(way: str, name: str, tmp_path: Any) -> None:
    options = {key: f"disk:{tmp_path}" if value == "disk" else value for key, value in CASES[name].items()}
    if way == "consumed":
        found, made = trained("backward", num_steps=3, **options)
        expected, _ = trained("none", num_steps=3, **options)
        made.backward(4)
        updated = made.used
    else:
        found, made, (*_, updated) = trained_undoably("backward", clip_some, **options)
        expected, _, _ = trained_undoably("none", clip_some, **options)
    assert not differences(found, expected)
    if options.get("spare_nbytes") == 9_000 and way == "consumed":
        assert updated
    elif name.endswith(", some stays"):
        assert updated > made.moving or way == "undoable"
    else:
        assert updated == (set() if name == "no room for updates" else made.moving)
