"""The runs of a chunk group that a step changes, and the states that are made on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from harness import session_of
from plain_modules import Stack

import chunkc
from chunkc.optim.group_runs import Task, flat_home, runs_of
from chunkc.session import Session

NUMEL = 64 * 64


class Steps:
    """Keeps states, counts steps; the hyper-parameters are the learning rate."""

    def __init__(self) -> None:
        self.states: dict[torch.Tensor, dict[str, Any]] = {}
        self.begun: list[torch.Tensor] = []

    def states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        return self.states.setdefault(parameter, {})

    def begin_update_of(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        self.begun.append(parameter)

    def next_hyper(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> Any:
        self.states[parameter]["step"].add_(1)
        return group["lr"]


def placed() -> tuple[Session, Stack]:
    """Three weights in one chunk, with room for their states."""
    model = Stack(3, bias=False)
    chunkc.place(model, chunk_size=3 * 4 * NUMEL)
    session = session_of(model)
    assert len(session.store.layout.groups) == 1
    session.store.reserve_states(0)
    return session, model


def tasks_of(model: Stack, optimizer: Steps, rates: Mapping[int, float]) -> list[Task]:
    weights = {layer: f"layers.{layer}.weight" for layer in rates}
    return [Task(optimizer, model.get_parameter(weights[i]), weights[i], {"lr": rates[i]}) for i in rates]


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
    runs = runs_of(session, 0, tasks_of(model, Steps(), rates), merged=merged)
    assert list(runs) == [(begin * NUMEL, end * NUMEL, rate) for begin, end, rate in expected]


def test_states_are_made_at_home_once() -> None:
    session, model = placed()
    optimizer = Steps()
    for step in (1, 2):
        runs_of(session, 0, tasks_of(model, optimizer, {1: 1.0}))
        state = optimizer.states[model.get_parameter("layers.1.weight")]
        assert int(state["step"]) == len(optimizer.begun) == step
        for kind in ("exp_avg", "exp_avg_sq"):
            flat_home(session, 0)[kind][NUMEL : 2 * NUMEL].fill_(step)
            assert (state[kind] == step).all()
            assert state[kind].shape == (64, 64)


def test_states_from_elsewhere_go_home() -> None:
    session, model = placed()
    optimizer = Steps()
    weight = model.get_parameter("layers.1.weight")
    former = {kind: torch.full((64, 64), 0.5) for kind in ("exp_avg", "exp_avg_sq")}
    optimizer.states[weight] = {"step": torch.tensor(7.0), **former}
    runs_of(session, 0, tasks_of(model, optimizer, {1: 1.0}))
    assert float(optimizer.states[weight]["step"]) == 8.0
    home = flat_home(session, 0)
    for kind in former:
        assert (home[kind][NUMEL : 2 * NUMEL] == 0.5).all()
        assert not home[kind][:NUMEL].any()
        assert optimizer.states[weight][kind].data_ptr() == home[kind][NUMEL:].data_ptr()
