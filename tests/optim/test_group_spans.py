"""The spans of a chunk group that a step changes, and the states that are made on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import session_of
from plain_modules import Stack

import chunkc
from chunkc.ir.layout import Chunk
from chunkc.ir.states import DEFAULT_STATES
from chunkc.optim.group_updates import spans_of
from chunkc.optim.states import initialise
from chunkc.optim.update_task import Task
from chunkc.runtime.store.parameter_views import ParameterViews
from chunkc.session.declared_states import declared_states
from chunkc.session.session import Session

NUMEL = 64 * 64


class Steps:
    """Keeps states, counts steps; the hyperparameters are the learning rate."""

    def __init__(self, num_stages: int = 1) -> None:
        self.rule = SimpleNamespace(num_stages=num_stages)
        self.states: dict[torch.Tensor, dict[str, Any]] = {}
        self.begun: list[torch.Tensor] = []

    def states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        return self.states.setdefault(parameter, {})

    def dtypes_of(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, torch.dtype]:
        return (declared_states(parameter) or DEFAULT_STATES).dtypes(parameter.dtype)

    def begin_states(self, state: Mapping[str, Any], kinds: Iterable[str]) -> None:
        pass

    def begin_update_of(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        self.begun.append(parameter)

    def hyper_at(self, group: Mapping[str, Any], step: int) -> Any:
        return group["lr"]

    def next_hyper(self, parameter: torch.Tensor, at: Callable[[int], Any]) -> Any:
        return at(int(self.states[parameter]["step"].add_(1)))


def placed() -> tuple[Session, Stack]:
    """Three weights in one chunk, with room for their states."""
    model = Stack(3, bias=False)
    chunkc.place(model, chunk_size=3 * 4 * NUMEL)
    session = session_of(model)
    assert len(session.store.layout.groups) == 1
    session.store.reserve_states(0)
    return session, model


def tasks_of(model: Stack, rates: Mapping[int, float]) -> list[Task]:
    weights = {layer: f"layers.{layer}.weight" for layer in rates}
    return [Task(model.get_parameter(weights[i]), weights[i], {"lr": rates[i]}) for i in rates]


@pytest.mark.parametrize(
    ("rates", "merged", "expected"),
    [
        ({0: 1.0, 1: 1.0, 2: 1.0}, True, [(0, 3, 1.0)]),
        ({0: 1.0, 1: 1.0, 2: 1.0}, False, [(0, 1, 1.0), (1, 2, 1.0), (2, 3, 1.0)]),
        ({0: 1.0, 1: 2.0, 2: 2.0}, True, [(0, 1, 1.0), (1, 3, 2.0)]),
        ({2: 1.0, 0: 1.0}, True, [(0, 1, 1.0), (2, 3, 1.0)]),  # in the group's order; the middle one has no gradient
    ],
)
def test_neighbours_with_equal_hyper_parameters_are_one_run(
    rates: dict[int, float], merged: bool, expected: list[tuple[int, int, float]]
) -> None:
    session, model = placed()
    spans = spans_of(Steps(1 if merged else 2), session, 0, tasks_of(model, rates))
    assert list(spans) == [(begin * NUMEL, end * NUMEL, rate) for begin, end, rate in expected]


def test_views_of_states_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    session, model = placed()
    optimizer, tasks = Steps(), {0: 1.0, 1: 1.0, 2: 1.0}
    spans_of(optimizer, session, 0, tasks_of(model, tasks))
    before = {p: dict(state) for p, state in optimizer.states.items()}
    made, real = [], ParameterViews.home_view
    monkeypatch.setattr(
        ParameterViews, "home_view", lambda views, kind, name: (made.append(kind), real(views, kind, name))[1]
    )
    spans_of(optimizer, session, 0, tasks_of(model, tasks))
    assert not made
    assert all(state[kind] is view for p, state in optimizer.states.items() for kind, view in before[p].items())
    session.store.release_states(0)  # to who has views of them: the next step's are elsewhere
    session.store.reserve_states(0)
    spans_of(optimizer, session, 0, tasks_of(model, tasks))
    assert sorted(made) == ["exp_avg"] * 3 + ["exp_avg_sq"] * 3
    assert all(state["exp_avg"] is not before[p]["exp_avg"] for p, state in optimizer.states.items())


def test_home_s_zeros_are_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """New room is all zeros; where others have written meanwhile, states begin as zeros all the same."""
    written: list[str] = []

    def recorded(kind: str, state: torch.Tensor, parameter: torch.Tensor) -> None:
        written.append(kind)
        initialise(kind, state, parameter)

    monkeypatch.setattr("chunkc.optim.group_updates.initialise", recorded)
    session, model = placed()
    optimizer = Steps()
    spans_of(optimizer, session, 0, tasks_of(model, {0: 1.0, 1: 1.0}))
    assert not written
    for state in optimizer.states.values():
        state["exp_avg"].fill_(3.0)
    optimizer.states.clear()
    spans_of(optimizer, session, 0, tasks_of(model, {0: 1.0, 1: 1.0, 2: 1.0}))
    assert written == ["exp_avg", "exp_avg_sq"] * 3
    assert not any(state["exp_avg"].any() for state in optimizer.states.values())
    session.store.release_states(0)
    session.store.reserve_states(0)
    optimizer.states.clear()
    spans_of(optimizer, session, 0, tasks_of(model, {1: 1.0}))
    assert len(written) == 6  # new room again


@pytest.mark.parametrize("access", ["view", "host_view", "writer", "reader"])
def test_who_may_have_written_a_chunk(access: str) -> None:
    session, _ = placed()
    arena, chunk = session.store.arena, Chunk("exp_avg", 0)
    assert arena.is_zero(chunk)
    if access == "view":
        arena.view(chunk, torch.float32, (4,), (1,), 0)
    elif access == "host_view":
        arena.host_view(chunk, torch.float32, 4)
    else:
        getattr(arena, access)(chunk, 0, torch.ones(4))()
    assert arena.is_zero(chunk) is (access == "reader")
