"""Updates in a backward: behind the last use of each group, where they fit; gradients that are used up stay away. Of
groups that stay, and whose gradients the backward uses up: what waits when, who stays then, and the verifier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from verify_cases import (
    HARDWARE,
    HUGE,
    LAYOUT,
    MEMORIES,
    MODULES,
    NUM_LAYERS,
    Case,
    backward_program,
    forward_program,
    give,
    plan_step,
    step_positions,
)
from verify_cases import step_positions as positions_of_step

from chunkc.ir import chunk_ops
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import GRAD, PARAM, Chunk, ChunkLayout, ParamSpec
from chunkc.ir.links import host_links
from chunkc.ir.plan import PREFETCH, WRITE_BACK, PhasePlan, Plan, Position, gradients_at
from chunkc.ir.verify.resident import resident_data_nbytes
from chunkc.ir.verify.verifier import verify_phase
from chunkc.passes.planning.layout import lay_out
from chunkc.passes.planning.residency import choose_resident
from chunkc.passes.planning.room import Room, fixed_nbytes
from chunkc.passes.planning.timeline import plan_phases
from chunkc.passes.planning.updates import MIN_TILE_NUMEL
from chunkc.passes.planning.updates_in_backward import updated_in, with_updates, with_waiting
from chunkc.passes.rewrite.insert import insert_events

STAGES = dict.fromkeys(range(NUM_LAYERS), 1)
MINIMUM = Room.of(LAYOUT, HUGE).check_minimum([p for phase in positions_of_step() for p in phase])


def updated(
    backward: tuple[Position, ...] | None = None, resident: frozenset[int] = frozenset(), external_nbytes: int = 0
) -> tuple[Position, ...]:
    """The step's backward, or another one, with all updates for which a huge budget has room."""
    room = Room.of(LAYOUT, HUGE, external_nbytes, resident)
    return with_updates(backward or positions_of_step()[1], room, STAGES, hardware=HARDWARE)


def copies(phase: PhasePlan, kind: str, of: str) -> Counter[int]:
    return Counter(e.item.group for stop in phase.stops for e in stop if e.kind == kind and e.item.kind == of)


def test_a_group_is_updated_right_behind_the_last_call_that_uses_it() -> None:
    names = [(p.name, None if p.tile is None else p.tile.group) for p in updated()]
    expected = []
    for layer in reversed(range(NUM_LAYERS)):
        expected += [(f"backward.{NUM_LAYERS - 1 - layer}", None), (f"update.{layer}[0:1024]", layer)]
    assert names == expected


def test_a_parameter_that_is_read_again_is_updated_later() -> None:
    """A tied weight: the last call of the backward reads it, too."""
    _, backward = positions_of_step()
    tied = (*backward[:-1], replace(backward[-1], reads=backward[-1].reads | {Chunk(PARAM, 2)}))
    found = updated(tied, frozenset({3}))
    assert [p.tile.group for p in found if p.tile is not None] == [1, 0, 2]
    assert found[-3].name == "backward.3"


def test_a_gradient_that_is_returned_leaves_its_group_to_the_step() -> None:
    _, backward = positions_of_step()
    hooked = tuple(replace(p, sunk=()) if p.name == "backward.1" else p for p in backward)
    assert updated_in(updated(hooked)) == {0, 1, 3}
    assert all(2 not in one for one in waiting(hooked)), "nor does it wait"


@pytest.mark.parametrize(("num_stages", "undoable"), [(1, ()), (2, ()), (1, (1, 2))])
def test_updates_come_as_soon_as_there_is_room_and_change_no_minimum(
    num_stages: int, undoable: tuple[int, ...]
) -> None:
    """Gradients of those that can be undone go home."""
    found = []
    for spare in range(-4096, 20_000, 512):
        updates = dict.fromkeys(STAGES, num_stages)
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
    assert updated_in(updated(external_nbytes=HUGE - MINIMUM)) == set()


def test_a_large_group_is_updated_in_tiles_that_fit() -> None:
    numel = 3 * MIN_TILE_NUMEL + 5
    layout = lay_out([ParamSpec("w", (numel,), (1,), torch.bfloat16, True)], numel * 2)
    nbytes = layout.chunk_nbytes_of
    call = Position(
        "backward.0", "backward", 500, "mm", "h", frozenset({Chunk(PARAM, 0)}), frozenset({Chunk(GRAD, 0)}), 1.0,
        sunk=(("w", False),), left_nbytes=70,
    )  # fmt: skip
    hardware = Hardware(1.0, 1e9, host_links(1e6, 1e6))
    minimum = Room.of(layout, HUGE).check_minimum([call])
    for spare in (10 * MIN_TILE_NUMEL, 10 * numel, 40 * numel):
        room = Room.of(layout, minimum - 430 + spare)
        found = with_updates([call], room, {0: 2}, hardware=hardware)
        tiles = [p.tile for p in found if p.tile is not None]
        for stage in (0, 1):
            parts = sorted((tile.begin, tile.end) for tile in tiles if tile.stage == stage)
            assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
            assert parts[-1][1] == layout.groups[0].numel
        assert {p.non_model_nbytes for p in found[1:]} == {70}
        assert max(sum(map(nbytes, p.items)) + 70 for p in found[1:]) <= room.left_nbytes
        plan = plan_phases([("backward", found)], room, hardware=hardware)
        assert plan.minimum_nbytes == minimum


ALL = frozenset(range(NUM_LAYERS))
SPENT = replace(LAYOUT, transient=ALL)
GRADIENT_NBYTES = 4096


def waiting(backward: tuple[Position, ...], layout: ChunkLayout = SPENT) -> list[dict[int, int]]:
    return [dict(position.waiting) for position in with_waiting(backward, layout)]


def planned(budget_nbytes: int, resident: frozenset[int] = ALL, layout: ChunkLayout = SPENT) -> Plan:
    forward, backward = step_positions()
    room = Room.of(layout, budget_nbytes, resident=resident)
    backward = with_updates(with_waiting(backward, layout), room, STAGES, hardware=HARDWARE)
    return plan_phases([("forward", forward), ("backward", backward)], room, hardware=HARDWARE, boundary_nbytes=500)


def case(budget_nbytes: int = HUGE, resident: frozenset[int] = ALL) -> Case:
    plan = planned(budget_nbytes, resident)
    graph = insert_events(
        backward_program(), plan.phases[1], MODULES, group_of=LAYOUT.group_of(), resident=resident
    ).graph
    options: dict[str, Any] = {"resident": resident, "external_nbytes": 0, "budget_nbytes": budget_nbytes}
    options |= {"present": plan.kept, "updates": plan.phases[1].updated, "layout": SPENT}
    return Case(plan, graph, options)


def rules(c: Case, **changes: object) -> set[str]:
    found = verify_phase(c.graph, memories=MEMORIES, **(c.options | changes))
    return {violation.partition(" ")[0].rstrip(":") for violation in found}


# --- what waits ---


@st.composite
def backwards(draw: st.DrawFn) -> tuple[ChunkLayout, tuple[Position, ...], frozenset[int]]:
    """A backward of some parameters of several to a group, made and read in any calls, and who stays."""
    num_parameters, num_calls = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    numels = draw(st.lists(st.integers(1, 700), min_size=num_parameters, max_size=num_parameters))
    specs = [ParamSpec(f"p{i}", (n,), (1,), torch.float32, True) for i, n in enumerate(numels)]
    layout = lay_out(specs, 2048)
    group_of = {int(name[1:]): group for name, group in layout.group_of().items()}
    made = {i: draw(st.integers(0, num_calls - 1)) for i in range(num_parameters)}
    read = {i: draw(st.sets(st.integers(0, num_calls - 1))) for i in range(num_parameters)}
    handed = {i: draw(st.booleans()) for i in range(num_parameters)}
    calls = tuple(
        Position(
            name=f"backward.{at}",
            phase="backward",
            non_model_nbytes=draw(st.integers(0, 500)),
            op="mm",
            module="",
            reads=frozenset(Chunk(PARAM, group_of[i]) for i in group_of if at in read[i]),
            writes=frozenset(Chunk(GRAD, group_of[i]) for i in group_of if made[i] == at),
            cost_s=1.0,
            sunk=tuple((f"p{i}", handed[i]) for i in made if made[i] == at),
        )
        for at in range(num_calls)
    )
    groups = frozenset(group.index for group in layout.groups)
    resident = frozenset(draw(st.sets(st.sampled_from(sorted(groups))))) if groups else groups
    return replace(layout, transient=groups), calls, resident


@given(backwards())
def test_what_waits_is_what_moments_count(drawn: tuple[ChunkLayout, tuple[Position, ...], frozenset[int]]) -> None:
    """And nothing is left: every group that stays is updated, behind all that reads it."""
    layout, backward, resident = drawn
    room = Room.of(layout, HUGE, resident=resident)
    line = with_updates(with_waiting(backward, layout), room, {}, hardware=HARDWARE)
    names = {s.spec.name: s.spec.gradient_nbytes for i in resident for s in layout.groups[i].slices}
    assert [position.waiting_nbytes(resident) for position in line] == [
        during for during, _ in gradients_at(line, names)
    ]
    updated = [position.tile.group for position in line if position.tile is not None]
    assert sorted(updated) == sorted(resident)
    for at, position in enumerate(line):
        if position.tile is not None:
            later = {item.group for other in line[at + 1 :] for item in other.items}
            assert position.tile.group not in later


# --- who stays ---


def test_more_groups_stay_without_their_gradients() -> None:
    forward, backward = step_positions()
    plain, spending = (*forward, *backward), (*forward, *with_waiting(backward, SPENT))
    for budget_nbytes in range(fixed_nbytes(LAYOUT, frozenset()) + 20_000, 80_000, 2_000):
        with_them = choose_resident(plain, Room.of(LAYOUT, budget_nbytes), ALL)
        without = choose_resident(spending, Room.of(SPENT, budget_nbytes), ALL)
        assert len(with_them) <= len(without)
        if without:
            Room.of(SPENT, budget_nbytes, 0, without).check_minimum(spending)
            plan = planned(budget_nbytes, without)
            assert plan.predicted_peak_nbytes <= budget_nbytes
            assert not rules(case(budget_nbytes, without))
    everything = fixed_nbytes(SPENT, ALL) + max(p.non_model_nbytes + p.waiting_nbytes(ALL) for p in spending)
    assert choose_resident(spending, Room.of(SPENT, everything), ALL) == ALL
    assert choose_resident(plain, Room.of(LAYOUT, everything), ALL) < ALL
    assert planned(everything).predicted_peak_nbytes == everything
    assert not rules(case(everything))


def test_the_verifier_counts_to_the_byte() -> None:
    _, backward = step_positions()
    most = max(p.non_model_nbytes + p.waiting_nbytes(ALL) for p in with_waiting(backward, SPENT))
    needed = resident_data_nbytes(SPENT, ALL) + most
    assert resident_data_nbytes(LAYOUT, ALL) - resident_data_nbytes(SPENT, ALL) == NUM_LAYERS * GRADIENT_NBYTES
    assert not rules(case(), budget_nbytes=needed)
    assert "budget" in rules(case(), budget_nbytes=needed - 1)


# --- sabotage ---


def update_of(c: Case, group: int) -> fx.Node:
    return next(node for node in c.all("update") if node.args[0] == group)


def placeholder(c: Case, name: str) -> fx.Node:
    return next(n for n in c.graph.nodes if n.name == name)


def update_twice(c: Case) -> None:
    node = update_of(c, 1)
    with c.graph.inserting_after(node):
        c.graph.call_function(chunk_ops.update, node.args)


@pytest.mark.parametrize(
    ("sabotage", "rule"),
    [
        (lambda c: c.graph.erase_node(update_of(c, 1)), "update"),
        (lambda c: c.call("backward.2").prepend(update_of(c, 1)), "update"),
        (lambda c: give(c.call("backward.3"), *c.call("backward.3").args[:-1], placeholder(c, "w1")), "update"),
        (update_twice, "write"),
        (lambda c: give(update_of(c, 1), *update_of(c, 1).args[:2], 1000), "write"),
    ],
    ids=["forgotten", "before the gradient", "before a reader", "twice", "of a part"],
)
def test_what_goes_wrong_is_found(sabotage: Callable[[Case], None], rule: str) -> None:
    c = case()
    assert not rules(c)
    sabotage(c)
    assert rule in rules(c)


def test_gradients_that_are_not_spent_are_not_used_up() -> None:
    c = case()
    assert rules(c, layout=LAYOUT) == {"read", "write"}


def test_the_forward_of_such_a_step_is_valid() -> None:
    plan = planned(HUGE)
    graph = insert_events(forward_program(), plan.phases[0], MODULES, group_of=LAYOUT.group_of(), resident=ALL).graph
    options: dict[str, Any] = {"resident": ALL, "external_nbytes": 0, "budget_nbytes": HUGE}
    assert not rules(Case(plan, graph, options | {"kept": plan.kept, "layout": SPENT}))
