"""The smallest budget that is known, over layouts made by hand."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from verify_cases import LAYOUT as STEP_LAYOUT
from verify_cases import captured_step

from chunkc.ir.errors import BudgetError
from chunkc.ir.layout import Chunk, ChunkLayout, ParamSpec
from chunkc.ir.plan import Position
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.ir.shards import Shards
from chunkc.passes.planning.layout import EMPTY_LAYOUT, extended
from chunkc.passes.planning.residency import check_minimum
from chunkc.policy.captured_step import Captured, profile
from chunkc.policy.needs import Needs, SessionNeeds, StepNeeds
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
    whole, cut = (
        (position(50, 0, 1),),
        (position(50, 0), position(50, 1)),
    )
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
