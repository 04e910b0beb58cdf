"""What the backend and `chunkc explain` ask of a captured graph: bytes held beside it, what stays, plans with room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from verify_cases import LAYOUT, MEMORIES, MODULES, NUM_LAYERS, backward_program, forward_program

from chunkc.captured import HELD_GRANULES, Captured, planned_with_room, profile, residents_with
from chunkc.ir.errors import BudgetError
from chunkc.passes.codegen import CompiledSegment
from chunkc.passes.planning import check_minimum, fixed_nbytes

HUGE = 1 << 40
SEGMENTS = {name: CompiledSegment(MODULES[name], memory) for name, memory in MEMORIES.items()}
CAPTURED = Captured(forward_program(), backward_program(), SEGMENTS, MODULES, whole=False)
EVERYTHING = frozenset(range(NUM_LAYERS))


def refusal(nbytes: int) -> BudgetError:
    return BudgetError(minimum_nbytes=nbytes, budget_nbytes=1, moment="", module="", contents=[])


def test_the_bytes_of_a_forward_and_of_its_predecessors_outputs_are_its_own() -> None:
    """Input and output take 100 bytes each; the former call's outputs are in the forward's own bytes."""
    assert CAPTURED.held_beside_forward(0, 0) == 0
    assert CAPTURED.held_beside_forward(100, 100) == 0
    assert CAPTURED.held_beside_forward(107, 0) == 7
    assert CAPTURED.held_beside_forward(0, 4096) == 3996, "the input is a view of a larger tensor"
    assert CAPTURED.held_beside_forward(107, 103) == 10


def test_of_the_first_graph_any_group_may_stay() -> None:
    needs = profile(CAPTURED, LAYOUT)
    minimum = check_minimum(needs.all, LAYOUT, HUGE, 0, all_may_stay=True)
    assert residents_with(CAPTURED, LAYOUT, HUGE, frozenset(), 0) == (EVERYTHING, minimum)
    assert residents_with(CAPTURED, LAYOUT, minimum, frozenset(), 0)[0] < EVERYTHING
    with pytest.raises(BudgetError) as error:
        residents_with(CAPTURED, LAYOUT, minimum - 1, frozenset(), 0)
    assert error.value.minimum_nbytes == minimum


def test_of_a_later_graph_what_has_left_does_not_come_back() -> None:
    assert residents_with(CAPTURED, LAYOUT, HUGE, frozenset({1}), 2)[0] == {1, 2, 3}, "the last two are new"
    assert residents_with(CAPTURED, LAYOUT, HUGE, frozenset(), NUM_LAYERS)[0] == frozenset()
    assert residents_with(CAPTURED, LAYOUT, HUGE, frozenset({0, 1}), 2)[0] == EVERYTHING


def test_only_where_all_may_stay_the_minimum_is_with_all() -> None:
    gaps = replace(LAYOUT, groups=tuple(replace(group, numel=16 * group.numel) for group in LAYOUT.groups))
    needs = profile(CAPTURED, gaps).all
    staying = fixed_nbytes(gaps, EVERYTHING) + max(p.non_model_nbytes for p in needs)
    moving = check_minimum(needs, gaps, HUGE, 0)
    assert staying < moving
    assert residents_with(CAPTURED, gaps, HUGE, EVERYTHING, NUM_LAYERS) == (EVERYTHING, staying)
    assert residents_with(CAPTURED, gaps, HUGE, frozenset({1}), NUM_LAYERS) == ({1}, moving)


@pytest.mark.parametrize(
    ("held", "limit", "asked", "spare"),
    [
        (0, HUGE, [0], 0),
        (64, HUGE, [64], 0),  # a whole granule already
        (65, HUGE, [128], 63),
        (65, 127, [128, 65], 0),
    ],
)
def test_a_plan_has_room_for_a_little_more_where_there_is_one(
    held: int, limit: int, asked: list[int], spare: int
) -> None:
    beside = []

    def planned(held_nbytes: int) -> str:
        beside.append(held_nbytes)
        if held_nbytes > limit:
            raise refusal(held_nbytes)
        return f"beside {held_nbytes}"

    assert planned_with_room(planned, held, 64 * HELD_GRANULES) == (f"beside {asked[-1]}", spare)
    assert beside == asked


def test_where_nothing_fits_the_error_is_for_what_is_held() -> None:
    def planned(held_nbytes: int) -> str:
        raise refusal(held_nbytes)

    with pytest.raises(BudgetError) as error:
        planned_with_room(planned, 65, 64 * HELD_GRANULES)
    assert error.value.minimum_nbytes == 65
