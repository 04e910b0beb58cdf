"""Which groups stand whole on every rank: as many as leave room, alike on all, and none for longer than it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from verify_cases import HARDWARE, MEMORIES, MODULES, NUM_LAYERS, backward_program, forward_program

from chunkc.ir.errors import BudgetError
from chunkc.ir.layout import ChunkLayout, ParamSpec
from chunkc.ir.shards import Shards, ZeroStage
from chunkc.ir.verify.resident import resident_data_nbytes
from chunkc.passes.codegen import CompiledSegment
from chunkc.passes.planning.layout import lay_out
from chunkc.passes.planning.residency import check_minimum, choose_replicated, remaining_replicated
from chunkc.policy.captured_step import Captured, profile
from chunkc.policy.decide import decide
from chunkc.policy.plans import step_plan, update_plan
from chunkc.policy.state import Forms, GraphCaptured, PhaseCalled, PlannerState, StepDecision, UpdateDue

HUGE = 1 << 40
SEGMENTS = {name: CompiledSegment(MODULES[name], memory) for name, memory in MEMORIES.items()}
CAPTURED = Captured(forward_program(), backward_program(), SEGMENTS, MODULES, whole=False)
EVERY = frozenset(range(NUM_LAYERS))


def cut(rows: Sequence[int] = (1024,) * NUM_LAYERS, rank: int = 0, stage: ZeroStage | None = None) -> ChunkLayout:
    """Four matrices, cut over three ranks, each in a chunk of its own."""
    specs = [
        ParamSpec(f"h.{i}.w", (n,), (1,), torch.float32, True).part(Shards((n,), 3, rank, stage))
        for i, n in enumerate(rows)
    ]
    return lay_out(specs, 4 * max(rows))


LAYOUT = cut()
NEEDS = profile(CAPTURED, LAYOUT).all
LEAST = check_minimum(NEEDS, LAYOUT, HUGE, 0)
MOST = check_minimum(NEEDS, LAYOUT.with_replicated(EVERY), HUGE, 0)


def captured(budget_nbytes: int) -> StepDecision:
    return decide(PlannerState(budget_nbytes), GraphCaptured(CAPTURED, LAYOUT))


def test_all_are_whole_as_soon_as_all_fit() -> None:
    assert captured(MOST).planner_state.layout.replicated_by_choice == EVERY
    assert captured(MOST - 1).planner_state.layout.replicated_by_choice < EVERY
    assert captured(LEAST).planner_state.layout.replicated_by_choice == frozenset()
    with pytest.raises(BudgetError) as error:
        captured(LEAST - 1)
    assert error.value.minimum_nbytes == LEAST


@given(st.integers(LEAST, MOST + 9999), st.integers(0, 4000))
def test_what_is_chosen_fits_and_is_verified(budget_nbytes: int, external_nbytes: int) -> None:
    decision = captured(budget_nbytes)
    assert not decision.planner_state.resident, "what ranks share has parts at home"
    step_plan(CAPTURED, decision.request, HARDWARE)
    try:
        beside = decide(decision.planner_state, PhaseCalled(Forms(CAPTURED), external_nbytes))
    except BudgetError:
        assert LEAST + external_nbytes > budget_nbytes, "it fits where nothing is whole"
        return
    assert beside.planner_state.layout.replicated_by_choice <= decision.planner_state.layout.replicated_by_choice, (
        "nobody comes back"
    )
    step_plan(CAPTURED, beside.request, HARDWARE)


def test_a_forced_stage_is_no_choice() -> None:
    for stage in (1, 2, 3):
        layout = cut(stage=stage)  # type: ignore[arg-type]
        assert (
            decide(PlannerState(HUGE), GraphCaptured(CAPTURED, layout)).planner_state.layout.replicated_by_choice
            == frozenset()
        )


def test_what_is_whole_leaves_where_others_hold_more() -> None:
    now = captured(MOST).planner_state
    after = decide(now, PhaseCalled(Forms(CAPTURED), 1000)).planner_state
    assert after.layout.replicated_by_choice < now.layout.replicated_by_choice
    assert after.key != now.key, "a plan for the one is none for the other"
    again = decide(after, PhaseCalled(Forms(CAPTURED), 0)).planner_state
    assert again.layout.replicated_by_choice == after.layout.replicated_by_choice


def test_a_later_graph_takes_room_too() -> None:
    now = replace(captured(MOST).planner_state, budget_nbytes=LEAST)
    assert decide(now, GraphCaptured(CAPTURED, now.layout)).planner_state.layout.replicated_by_choice == frozenset()


def test_for_an_update_what_is_whole_gives_its_room_back_for_a_while() -> None:
    now = captured(MOST).planner_state
    groups = tuple(sorted(EVERY))
    roomy = decide(now, UpdateDue(groups, 0))
    assert roomy.request is not None
    assert roomy.request.planner_state == now
    external_nbytes = now.budget_nbytes - resident_data_nbytes(now.layout, ())
    tight = decide(now, UpdateDue(groups, external_nbytes))
    assert tight.planner_state is now, "afterwards it is as before"
    assert tight.request is not None
    assert tight.request.planner_state.layout.replicated_by_choice < now.layout.replicated_by_choice
    update_plan(tight.request, HARDWARE)


@given(st.lists(st.integers(1, 3000), min_size=NUM_LAYERS, max_size=NUM_LAYERS), st.floats(0, 1))
def test_ranks_choose_alike_whatever_their_parts(rows: list[int], share: float) -> None:
    found = []
    for rank in range(3):
        layout = cut(rows, rank)
        needs = profile(CAPTURED, layout).all
        least = check_minimum(needs, layout, HUGE, 0)
        most = check_minimum(needs, layout.with_replicated(range(len(layout.groups))), HUGE, 0)
        budget = int(least + share * (most - least))
        every = frozenset(range(len(layout.groups)))
        chosen = choose_replicated(needs, layout, budget, every)
        beside = remaining_replicated(needs, layout.with_replicated(every), budget, 0)
        found.append((least, most, chosen.replicated_by_choice, beside.replicated_by_choice))
    assert len(set(found)) == 1
