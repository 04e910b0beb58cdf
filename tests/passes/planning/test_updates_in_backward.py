"""Updates in a backward: behind the last use of each group, where they fit; gradients that are used up stay away."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from verify_cases import HARDWARE, HUGE, LAYOUT, MEMORIES, MODULES, NUM_LAYERS, backward_program, plan_step
from verify_cases import step_positions as positions_of_step

from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import GRAD, PARAM, Chunk, ParamSpec
from chunkc.ir.links import host_links
from chunkc.ir.plan import PREFETCH, WRITE_BACK, PhasePlan, Position
from chunkc.ir.verify.verifier import verify_phase
from chunkc.passes.planning.layout import lay_out
from chunkc.passes.planning.residency import check_minimum
from chunkc.passes.planning.timeline import plan_phases
from chunkc.passes.planning.updates import MIN_TILE_NUMEL
from chunkc.passes.planning.updates_in_backward import updated_in, with_updates
from chunkc.passes.rewrite.insert import insert_events

ALL = dict.fromkeys(range(NUM_LAYERS), 1)
MINIMUM = check_minimum([p for phase in positions_of_step() for p in phase], LAYOUT, HUGE, 0)


def updated(budget_nbytes: int, updates: dict[int, int] = ALL, external_nbytes: int = 0) -> tuple[Position, ...]:
    _, backward = positions_of_step()
    return with_updates(
        backward,
        LAYOUT,
        updates,
        budget_nbytes=budget_nbytes,
        external_nbytes=external_nbytes,
        resident=frozenset(),
        hardware=HARDWARE,
    )


def copies(phase: PhasePlan, kind: str, of: str) -> Counter[int]:
    return Counter(e.item.group for stop in phase.stops for e in stop if e.kind == kind and e.item.kind == of)


def test_a_group_is_updated_right_behind_the_last_call_that_uses_it() -> None:
    names = [(p.name, None if p.tile is None else p.tile.group) for p in updated(HUGE)]
    expected = []
    for layer in reversed(range(NUM_LAYERS)):
        expected += [(f"backward.{NUM_LAYERS - 1 - layer}", None), (f"update.{layer}[0:1024]", layer)]
    assert names == expected


def test_a_parameter_that_is_read_again_is_updated_later() -> None:
    """A tied weight: the last call of the backward reads it, too."""
    _, backward = positions_of_step()
    tied = (*backward[:-1], replace(backward[-1], reads=backward[-1].reads | {Chunk(PARAM, 2)}))
    found = with_updates(
        tied, LAYOUT, ALL, budget_nbytes=HUGE, external_nbytes=0, resident=frozenset({3}), hardware=HARDWARE
    )
    assert [p.tile.group for p in found if p.tile is not None] == [1, 0, 2]
    assert found[-3].name == "backward.3"


def test_a_gradient_that_is_returned_leaves_its_group_to_the_step() -> None:
    _, backward = positions_of_step()
    hooked = tuple(replace(p, sunk=()) if p.name == "backward.1" else p for p in backward)
    found = with_updates(
        hooked, LAYOUT, ALL, budget_nbytes=HUGE, external_nbytes=0, resident=frozenset(), hardware=HARDWARE
    )
    assert updated_in(found) == {0, 1, 3}


@pytest.mark.parametrize(("num_stages", "undoable"), [(1, ()), (2, ()), (1, (1, 2))])
def test_updates_come_as_soon_as_there_is_room_and_change_no_minimum(
    num_stages: int, undoable: tuple[int, ...]
) -> None:
    """Gradients of those that can be undone go home."""
    found = []
    for spare in range(-4096, 20_000, 512):
        updates = dict.fromkeys(ALL, num_stages)
        plan = plan_step(MINIMUM + max(0, spare), updates=updates, undoable=undoable)
        assert plan.minimum_nbytes == MINIMUM
        assert plan.predicted_peak_nbytes <= plan.budget_nbytes
        found.append(len(plan.phases[1].updated))
        phase = plan.phases[1]
        graph = insert_events(
            backward_program(), phase, MODULES, group_of=LAYOUT.group_of(), resident=frozenset(), layout=LAYOUT
        )
        violations = verify_phase(
            graph.graph,
            layout=LAYOUT,
            memories=MEMORIES,
            resident=frozenset(),
            external_nbytes=0,
            budget_nbytes=plan.budget_nbytes,
            present=plan.kept,
            updates=phase.updated,
            undoable=undoable,
        )
        assert not violations
        for group in phase.updated:
            assert copies(phase, WRITE_BACK, GRAD)[group] == (group in undoable)
            assert copies(phase, WRITE_BACK, PARAM)[group] == 1
            assert copies(phase, WRITE_BACK, "exp_avg")[group] == copies(phase, PREFETCH, "exp_avg")[group] >= 1
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, NUM_LAYERS)
    assert updated_in(updated(HUGE, external_nbytes=HUGE - MINIMUM)) == set()


def test_a_large_group_is_updated_in_tiles_that_fit() -> None:
    numel = 3 * MIN_TILE_NUMEL + 5
    layout = lay_out([ParamSpec("w", (numel,), (1,), torch.bfloat16, True)], numel * 2)
    nbytes = layout.chunk_nbytes_of
    call = Position(
        "backward.0", "backward", 500, "mm", "h", frozenset({Chunk(PARAM, 0)}), frozenset({Chunk(GRAD, 0)}), 1.0,
        sunk=(("w", False),), left_nbytes=70,
    )  # fmt: skip
    hardware = Hardware(1.0, 1e9, host_links(1e6, 1e6))
    minimum = check_minimum([call], layout, HUGE, 0)
    for spare in (10 * MIN_TILE_NUMEL, 10 * numel, 40 * numel):
        budget = minimum - 430 + spare
        found = with_updates(
            [call], layout, {0: 2}, budget_nbytes=budget, external_nbytes=0, resident=frozenset(), hardware=hardware
        )
        tiles = [p.tile for p in found if p.tile is not None]
        for stage in (0, 1):
            parts = sorted((tile.begin, tile.end) for tile in tiles if tile.stage == stage)
            assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
            assert parts[-1][1] == layout.groups[0].numel
        assert {p.non_model_nbytes for p in found[1:]} == {70}
        assert max(sum(map(nbytes, p.items)) + 70 for p in found[1:]) <= budget - check_minimum([], layout, HUGE, 0)
        plan = plan_phases([("backward", found)], layout, budget_nbytes=budget, resident=frozenset(), hardware=hardware)
        assert plan.minimum_nbytes == minimum
