"""The smallest budget that is known, over layouts made by hand. When it is known of a step of several graphs that all
saved values fit; what is asked of a captured graph before any plan, and what part of a model it is.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn
from verify_cases import LAYOUT as STEP_LAYOUT
from verify_cases import backward_program, captured_step

from chunkc.ir.errors import BudgetError
from chunkc.ir.items import KEEP_ALL, ActivationPlan
from chunkc.ir.layout import Chunk, ChunkLayout, ParamSpec
from chunkc.ir.plan import Position
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.ir.shards import Shards
from chunkc.passes.planning.layout import EMPTY_LAYOUT, extended
from chunkc.passes.planning.residency import check_minimum, everything, fixed_nbytes
from chunkc.policy.captured_step import Captured, profile
from chunkc.policy.graph_fraction import NEARLY_ALL, graph_fraction
from chunkc.policy.needs import Needs, SessionNeeds, StepNeeds
from chunkc.policy.seen_steps import SeenForward, SeenSteps, covers_model, keeps_all
from chunkc.policy.state import EMPTY_CONTEXT, PlannerState


def spec(name: str, numel: int) -> ParamSpec:
    return ParamSpec(name, (numel,), (1,), torch.float32, True)


def laid_out(*specs: ParamSpec, before: ChunkLayout = EMPTY_LAYOUT) -> ChunkLayout:
    return extended(before, specs, (), 4096)


TRAINED = {"a.weight"}
LAYOUT = laid_out(spec("a.weight", 1024), spec("b.weight", 1024), spec("a.bias", 8))


def position(nbytes: int, *groups: int) -> Position:
    chunks = frozenset(Chunk("param", group) for group in groups)
    return Position("forward.0", "forward", nbytes, "aten.mm", "a", chunks, frozenset(), 0.0)


POSITIONS = (position(100, 0), position(50, 0, 1), position(3000))


def refused(nbytes: int) -> BudgetError:
    return BudgetError(minimum_nbytes=nbytes, budget_nbytes=1, moment="aten.mm", module="a", contents=[])


def named(known: SessionNeeds, error: BudgetError, needs: Needs, num_graphs: int) -> BudgetError:
    return known.named(error, PlannerState(1, LAYOUT, num_graphs=num_graphs, trained=frozenset(TRAINED)), needs)


def never_described() -> Captured:
    raise AssertionError("an error takes no time to describe another form")


@pytest.mark.parametrize("external_nbytes", [0, 1000])
def test_the_minimum_of_one_graph_is_the_planners(external_nbytes: int) -> None:
    known, noted = SessionNeeds(), StepNeeds()
    assert known.minimum_nbytes(LAYOUT, "keep") == 0
    noted.add(Needs.of(POSITIONS, LAYOUT).plus(external_nbytes))
    known.note(noted)
    wanted = check_minimum(POSITIONS, LAYOUT, 1 << 40, external_nbytes, all_may_be_resident=True)
    assert known.minimum_nbytes(LAYOUT, "keep") == wanted
    assert Needs.of(POSITIONS, LAYOUT, external_nbytes) == Needs.of(POSITIONS, LAYOUT).plus(external_nbytes)
    assert Needs.of((), LAYOUT) == Needs()


def test_what_is_cut_over_ranks_moves_in_every_budget() -> None:
    """Where ranks are many, all that one has at home takes less room than a whole chunk."""
    layout = laid_out(replace(spec("a.weight", 64), shards=Shards((1024,), 16, 0)))
    known, noted, positions = SessionNeeds(), StepNeeds(), (position(100, 0),)
    noted.add(Needs.of(positions, layout))
    known.note(noted)
    assert known.minimum_nbytes(layout, "keep") == check_minimum(positions, layout, 1 << 40, 0)


def test_what_stays_for_good_counts_in_every_graph() -> None:
    """Also what a later graph has brought."""
    known, noted = SessionNeeds(), StepNeeds()
    noted.add(Needs.of(POSITIONS, LAYOUT))
    known.note(noted)
    wider = laid_out(spec("c.bias", 8), before=LAYOUT)
    assert (
        known.minimum_nbytes(wider, "keep") - known.minimum_nbytes(LAYOUT, "keep") == 8 * 4 * 4 + 4
    )  # with gradient, states, step


def test_an_error_names_all_that_is_known_and_no_less_than_one_before() -> None:
    known, noted = SessionNeeds(), StepNeeds()
    noted.add(Needs.of(POSITIONS, LAYOUT, 5000))
    known.note(noted)
    most = known.minimum_nbytes(LAYOUT, "keep")
    first = named(known, refused(10), Needs(), 1)
    assert (first.minimum_nbytes, first.covers) == (most, "")
    second = named(known, refused(most + 7), Needs(), 2)
    assert (second.minimum_nbytes, second.covers) == (most + 7, "the 2 graphs compiled so far")
    third = named(known, refused(most + 1), Needs.of(POSITIONS, LAYOUT, 2), 2)
    assert third.minimum_nbytes == most + 7 == known.minimum_nbytes(LAYOUT, "keep")
    fourth = named(known, refused(10), Needs.of(POSITIONS, LAYOUT, 9000), 2)
    assert fourth.minimum_nbytes == most + 4000


def test_a_first_graph_that_is_a_part_says_so() -> None:
    known = SessionNeeds()
    known.more_graphs_may_follow = True
    assert named(known, refused(10), Needs(), 1).covers == "the graph compiled so far"


def test_a_whole_graph_may_need_less_than_all_its_chunks_at_once() -> None:
    """An error does not name them: cut into segments, the graph would do with fewer."""
    whole, cut = ((position(50, 0, 1),), (position(50, 0), position(50, 1)))
    for is_whole, positions in ((True, whole), (False, cut)):
        known, noted = SessionNeeds(), StepNeeds(None, never_described if is_whole else None)
        noted.add(Needs.of(positions, LAYOUT))
        known.note(noted)
        error = named(known, refused(1), Needs.of(cut, LAYOUT), 1)
        assert error.minimum_nbytes == check_minimum(cut, LAYOUT, 1 << 40, 0)


def test_a_whole_step_would_need_less_in_segments() -> None:
    """Each phase beside the most that was held in it, whatever the whole form took."""
    cut = captured_step()
    step = profile(cut, STEP_LAYOUT)
    known, noted = SessionNeeds(), StepNeeds(None, lambda: cut)
    noted.add(Needs(1 << 40, 1 << 40))
    known.note(noted)
    for phase, external_nbytes in ((FORWARD, 5), (FORWARD, 0), (BACKWARD, 1000), (BACKWARD, 7)):
        noted.ran(phase, EMPTY_CONTEXT, frozenset(), external_nbytes)
    needs = Needs.of(step.forward, STEP_LAYOUT, 5) | Needs.of(step.backward, STEP_LAYOUT, 1000)
    assert known.minimum_nbytes(STEP_LAYOUT, "keep") == needs.minimum_nbytes(STEP_LAYOUT)
    unbounded = StepNeeds(None, lambda: cut)
    unbounded.add(Needs(1 << 40, 1))
    known.note(unbounded)
    unbounded.ran(BACKWARD, EMPTY_CONTEXT, frozenset(), 1000)
    assert unbounded.least(STEP_LAYOUT, "keep").all_resident_nbytes == 1, "whole it may need less, too"


def test_a_step_that_is_gone_is_forgotten() -> None:
    known, noted = SessionNeeds(), StepNeeds()
    noted.add(Needs.of(POSITIONS, LAYOUT))
    known.note(noted)
    del noted
    gc.collect()
    assert known.minimum_nbytes(LAYOUT, "keep") == 0


# ---------------------------------------------------------------- steps that were seen

NAMES = tuple(STEP_LAYOUT.specs())
BACKWARD_PROGRAM = replace(backward_program(), gradient_outputs=tuple((0, "", name) for name in NAMES))
CAPTURED = replace(captured_step(), backward=BACKWARD_PROGRAM, graph_fraction=0.25)
MODEL_NBYTES = fixed_nbytes(STEP_LAYOUT, everything(STEP_LAYOUT))


def seen(names: tuple[str, ...] = NAMES, **changes: object) -> SeenForward:
    found = SeenForward.of(CAPTURED, KEEP_ALL, STEP_LAYOUT, 0)
    return replace(found, **{"parameters": frozenset(names), "graph_fraction": 1.0, **changes})  # type: ignore[arg-type]


def test_a_forward_is_seen_as_if_it_had_kept_all() -> None:
    most_nbytes = max(position.non_model_nbytes for position in profile(CAPTURED, STEP_LAYOUT).all)
    assert (seen().most_nbytes, seen().away_nbytes) == (most_nbytes, 0)
    away = ActivationPlan(frozenset(saved.storage for saved in CAPTURED.offloadable))
    found = SeenForward.of(CAPTURED, away, STEP_LAYOUT, 7)
    assert (found.most_nbytes, found.external_nbytes) == (most_nbytes, 7)
    assert found.away_nbytes == sum(saved.nbytes for saved in CAPTURED.offloadable)


def test_graphs_cover_a_model_by_the_elements_that_they_train() -> None:
    numel = [STEP_LAYOUT.specs()[name].whole_numel for name in NAMES]
    first = numel[0] / sum(numel)
    parts = [seen((NAMES[0],), graph_fraction=first), seen(NAMES[1:])]
    assert covers_model(parts, STEP_LAYOUT)
    assert not covers_model(parts[:1], STEP_LAYOUT)
    assert not covers_model([*parts[:1], *parts[:1]], STEP_LAYOUT)  # the same ones twice


def test_values_that_are_away_count_for_all_later_graphs() -> None:
    forwards = [
        seen(most_nbytes=100, external_nbytes=10, away_nbytes=50),
        seen(most_nbytes=20, external_nbytes=10, away_nbytes=0),
        seen(most_nbytes=100, external_nbytes=20, away_nbytes=1000),
    ]
    needed = MODEL_NBYTES + 100 + 20 + 50
    assert keeps_all(forwards, STEP_LAYOUT, needed)
    assert not keeps_all(forwards, STEP_LAYOUT, needed - 1)
    assert not keeps_all(forwards[:1], STEP_LAYOUT, MODEL_NBYTES + 109)


@pytest.mark.parametrize("external_nbytes", [0, 5])
def test_it_is_known_from_the_second_step_on_and_for_the_same_graph(external_nbytes: int) -> None:
    nearly, other = replace(CAPTURED, graph_fraction=0.99), replace(CAPTURED)
    budget_nbytes = MODEL_NBYTES + seen().most_nbytes + 5
    steps = SeenSteps()

    def step() -> list[bool]:
        known = [steps.forward_begins(graph, STEP_LAYOUT, budget_nbytes) for graph in (other, nearly)]
        steps.forward_ran(nearly, KEEP_ALL, STEP_LAYOUT, 0)
        steps.backward_ran(nearly, external_nbytes)
        return known

    assert [step(), step()] == [[False, False], [False, True]]
    external_nbytes = 6  # what a backward found is too much
    assert step() == [False, True]
    assert step() == [False, False]


def test_a_step_over_a_part_of_the_model_says_nothing() -> None:
    steps = SeenSteps()
    for _ in range(2):
        assert not steps.forward_begins(CAPTURED, STEP_LAYOUT, 1 << 40)
        steps.forward_ran(CAPTURED, KEEP_ALL, STEP_LAYOUT, 0)
        steps.backward_ran(CAPTURED, 0)


# ---------------------------------------------------------------- a captured graph before any plan

WHOLE = captured_step()


def test_the_bytes_of_a_forward_and_of_its_predecessors_outputs_are_its_own() -> None:
    """Input and output take 100 bytes each; the former call's outputs are in the forward's own bytes."""
    assert WHOLE.external_in_forward(0, 0) == 0
    assert WHOLE.external_in_forward(100, 100) == 0
    assert WHOLE.external_in_forward(107, 0) == 7
    assert WHOLE.external_in_forward(0, 4096) == 3996, "the input is a view of a larger tensor"
    assert WHOLE.external_in_forward(107, 103) == 10


def test_a_profile_is_made_once_for_a_layout() -> None:
    captured = replace(WHOLE)
    found = profile(captured, STEP_LAYOUT)
    assert profile(captured, STEP_LAYOUT) is found
    other = replace(STEP_LAYOUT, groups=(*STEP_LAYOUT.groups,))
    assert profile(captured, replace(STEP_LAYOUT, overhead_nbytes=1)) is found
    assert profile(captured, other) == found
    assert profile(captured, other) is not found


# ---------------------------------------------------------------- graph fraction


def test_trained_elements_count_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False))
    first, second, last = (layer.weight for layer in model)
    assert graph_fraction([model], [torch.randn(2), first]) == pytest.approx(1 / 4)
    assert graph_fraction([model], [first, second, first, 3]) == pytest.approx(1 / 2)
    last.requires_grad_(False)
    assert graph_fraction([model], [first, last]) == pytest.approx(1 / 2)


def test_nearly_all_is_all_and_so_is_nothing() -> None:
    model = nn.ParameterList(torch.randn(size) for size in (80, 20))
    assert NEARLY_ALL == 0.8
    assert graph_fraction([model], [model[0]]) == 1.0
    assert graph_fraction([model], [model[1]]) == pytest.approx(0.2)
    assert graph_fraction([model], []) == graph_fraction([], [model[1]]) == 1.0
