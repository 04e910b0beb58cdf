"""The spans of a chunk group that a step changes, and the states that are made on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from harness import counted, session_of
from plain_modules import Stack

import chunkc
from chunkc.ir.layout import Chunk
from chunkc.optim import group_updates
from chunkc.optim.group_updates import spans_of
from chunkc.optim.update_task import Task, UpdateTask, Where

NUMEL = 64 * 64


class Subject:
    """Three weights in one chunk, with room for their states, and an optimizer."""

    def __init__(self, kind: Any = chunkc.optim.AdamW) -> None:
        self.model = Stack(3, bias=False)
        self.optimizer = kind(self.model.parameters())
        chunkc.place(self.model, chunk_size=3 * 4 * NUMEL)
        self.session = session_of(self.model)
        assert len(self.session.store.layout.groups) == 1
        self.session.store.reserve_states(0)

    def begin(self, rates: Mapping[int, float]) -> list[tuple[int, int, float]]:
        """Begin an update of layers, each with a rate of its own; the spans in weights, with their rates."""
        names = {layer: f"layers.{layer}.weight" for layer in rates}
        (group,) = self.optimizer.param_groups
        tasks = [Task(self.model.get_parameter(names[i]), names[i], group | {"lr": rates[i]}) for i in rates]
        spans = spans_of(self.optimizer, self.session, UpdateTask.of(self.session, 0, tasks, Where.SLOTS))
        return [(begin / NUMEL, end / NUMEL, hyper.lr) for begin, end, hyper in spans]

    def states(self) -> list[dict[str, Any]]:
        return [dict(self.optimizer.states_of(parameter)) for parameter in self.model.parameters()]

    def move_states(self) -> None:
        """Leave the former ones to who has views of them."""
        self.session.store.release_states(0)
        self.session.store.reserve_states(0)


@pytest.mark.parametrize(
    ("kind", "rates", "expected"),
    [
        (chunkc.optim.AdamW, {0: 1.0, 1: 1.0, 2: 1.0}, [(0, 3, 1.0)]),
        (chunkc.optim.LAMB, {0: 1.0, 1: 1.0, 2: 1.0}, [(0, 1, 1.0), (1, 2, 1.0), (2, 3, 1.0)]),
        (chunkc.optim.AdamW, {0: 1.0, 1: 2.0, 2: 2.0}, [(0, 1, 1.0), (1, 3, 2.0)]),
        # in the group's order; the middle one has no gradient
        (chunkc.optim.AdamW, {2: 1.0, 0: 1.0}, [(0, 1, 1.0), (2, 3, 1.0)]),
    ],
)
def test_neighbours_with_equal_hyper_parameters_are_one_run(
    kind: Any, rates: dict[int, float], expected: list[tuple[int, int, float]]
) -> None:
    assert Subject(kind).begin(rates) == expected


def test_views_of_states_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, rates = Subject(), {0: 1.0, 1: 1.0, 2: 1.0}
    subject.begin(rates)
    before = subject.states()
    count = counted(monkeypatch, subject.session.store.views, "home_view")
    subject.begin(rates)
    assert count.calls == 0
    assert all(now[kind] is view for then, now in zip(before, subject.states()) for kind, view in then.items())
    subject.move_states()
    subject.begin(rates)
    assert count.calls == 6
    assert all(now["exp_avg"] is not then["exp_avg"] for then, now in zip(before, subject.states()))


def test_home_s_zeros_are_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """New room is all zeros; where others have written meanwhile, states begin as zeros all the same."""
    written, subject = counted(monkeypatch, group_updates, "initialise"), Subject()
    subject.begin({0: 1.0, 1: 1.0})
    assert written.calls == 0
    for state in subject.states()[:2]:
        state["exp_avg"].fill_(3.0)
    subject.optimizer.state.clear()
    subject.begin({0: 1.0, 1: 1.0, 2: 1.0})
    assert written.calls == 6
    assert not any(state["exp_avg"].any() for state in subject.states())
    subject.move_states()
    subject.optimizer.state.clear()
    subject.begin({1: 1.0})
    assert written.calls == 6  # new room again


@pytest.mark.parametrize("access", ["view", "host_view", "writer", "reader"])
def test_who_may_have_written_a_chunk(access: str) -> None:
    subject, chunk = Subject(), Chunk("exp_avg", 0)
    arena = subject.session.store.arena
    assert arena.is_zero(chunk)
    if access == "view":
        arena.view(chunk, torch.float32, (4,), (1,), 0)
    elif access == "host_view":
        arena.host_view(chunk, torch.float32, 4)
    else:
        getattr(arena, access)(chunk, 0, torch.ones(4))()
    assert arena.is_zero(chunk) is (access == "reader")
