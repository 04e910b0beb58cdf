"""When it is known of a step of several graphs that all saved values fit: after a whole one, and no sooner."""

from __future__ import annotations

from dataclasses import replace

import pytest
from verify_cases import LAYOUT, backward_program, captured_step

from chunkc.ir.items import KEEP_ALL, ActivationPlan
from chunkc.passes.planning.residency import everything, fixed_nbytes
from chunkc.policy.captured_step import profile
from chunkc.policy.seen_steps import SeenForward, SeenSteps, covers_model, keeps_all

NAMES = tuple(LAYOUT.specs())
BACKWARD = replace(backward_program(), gradient_outputs=tuple((0, "", name) for name in NAMES))
CAPTURED = replace(captured_step(), backward=BACKWARD, graph_fraction=0.25)
MODEL_NBYTES = fixed_nbytes(LAYOUT, everything(LAYOUT))


def seen(names: tuple[str, ...] = NAMES, **changes: object) -> SeenForward:
    found = SeenForward.of(CAPTURED, KEEP_ALL, LAYOUT, 0)
    return replace(found, **{"parameters": frozenset(names), "graph_fraction": 1.0, **changes})  # type: ignore[arg-type]


def test_a_forward_is_seen_as_if_it_had_kept_all() -> None:
    most_nbytes = max(position.non_model_nbytes for position in profile(CAPTURED, LAYOUT).all)
    assert (seen().most_nbytes, seen().away_nbytes) == (most_nbytes, 0)
    away = ActivationPlan(frozenset(saved.storage for saved in CAPTURED.offloadable))
    found = SeenForward.of(CAPTURED, away, LAYOUT, 7)
    assert (found.most_nbytes, found.external_nbytes) == (most_nbytes, 7)
    assert found.away_nbytes == sum(saved.nbytes for saved in CAPTURED.offloadable)


def test_graphs_cover_a_model_by_the_elements_that_they_train() -> None:
    numel = [LAYOUT.specs()[name].whole_numel for name in NAMES]
    first = numel[0] / sum(numel)
    parts = [seen((NAMES[0],), graph_fraction=first), seen(NAMES[1:])]
    assert covers_model(parts, LAYOUT)
    assert not covers_model(parts[:1], LAYOUT)
    assert not covers_model([*parts[:1], *parts[:1]], LAYOUT)  # the same ones twice


def test_values_that_are_away_count_for_all_later_graphs() -> None:
    forwards = [
        seen(most_nbytes=100, external_nbytes=10, away_nbytes=50),
        seen(most_nbytes=20, external_nbytes=10, away_nbytes=0),
        seen(most_nbytes=100, external_nbytes=20, away_nbytes=1000),
    ]
    needed = MODEL_NBYTES + 100 + 20 + 50
    assert keeps_all(forwards, LAYOUT, needed)
    assert not keeps_all(forwards, LAYOUT, needed - 1)
    assert not keeps_all(forwards[:1], LAYOUT, MODEL_NBYTES + 109)


@pytest.mark.parametrize("external_nbytes", [0, 5])
def test_it_is_known_from_the_second_step_on_and_for_the_same_graph(external_nbytes: int) -> None:
    nearly, other = replace(CAPTURED, graph_fraction=0.99), replace(CAPTURED)
    budget_nbytes = MODEL_NBYTES + seen().most_nbytes + 5
    steps = SeenSteps()

    def step() -> list[bool]:
        known = [steps.forward_begins(graph, LAYOUT, budget_nbytes) for graph in (other, nearly)]
        steps.forward_ran(nearly, KEEP_ALL, LAYOUT, 0)
        steps.backward_ran(nearly, external_nbytes)
        return known

    assert [step(), step()] == [[False, False], [False, True]]
    external_nbytes = 6  # what a backward found is too much
    assert step() == [False, True]
    assert step() == [False, False]


def test_a_step_over_a_part_of_the_model_says_nothing() -> None:
    steps = SeenSteps()
    for _ in range(2):
        assert not steps.forward_begins(CAPTURED, LAYOUT, 1 << 40)
        steps.forward_ran(CAPTURED, KEEP_ALL, LAYOUT, 0)
        steps.backward_ran(CAPTURED, 0)
