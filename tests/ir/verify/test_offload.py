"""The verifier on storages that are at home between the phases: plans are accepted, each sabotage is reported."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import fx
from verify_cases import HARDWARE, HUGE, LAYOUT, MEMORIES, MODULES, Case, backward_program, forward_program

from chunkc.ir import chunk_ops
from chunkc.ir.items import SavedStorage
from chunkc.ir.links import FROM_DISK, TO_DISK
from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK
from chunkc.passes.memory.profile import positions
from chunkc.passes.planning.offload import Saved, with_offloaded
from chunkc.passes.planning.room import Room
from chunkc.passes.planning.timeline import plan_phases
from chunkc.passes.rewrite.insert import insert_events

FIRST, SECOND = SavedStorage("forward.0:0"), SavedStorage("forward.1:0")
SAVED = (Saved(FIRST.name, 100, 1, 2), Saved(SECOND.name, 100, 2, 1))
AWAY = frozenset({FIRST.name, SECOND.name})


def step_case(phase: str, spare: int = 0) -> Case:
    """The hand-written step under its smallest budget, plus `spare` bytes, with two of its saved storages away."""
    programs = with_offloaded(forward_program(), AWAY), with_offloaded(backward_program(), AWAY)
    forward, backward = (positions(p, MEMORIES, group_of=LAYOUT.group_of()) for p in programs)
    budget = Room.of(LAYOUT, HUGE).check_minimum((*forward, *backward)) + spare
    plan = plan_phases(
        [("forward", forward), ("backward", backward)],
        Room.of(LAYOUT, budget),
        hardware=HARDWARE,
        boundary_nbytes=300,
        saved=SAVED,
    )
    index = ("forward", "backward").index(phase)
    graph = insert_events(
        programs[index], plan.phases[index], MODULES, group_of=LAYOUT.group_of(), resident=frozenset()
    )
    options: dict[str, Any] = {
        "resident": frozenset(),
        "external_nbytes": 0,
        "budget_nbytes": budget,
        "offloaded": AWAY,
    }
    options |= {"kept": plan.kept} if phase == "forward" else {"present": plan.kept}
    return Case(plan, graph.graph, options)


@pytest.mark.parametrize("spare", [0, 1, 100, 200, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_plans_are_accepted_and_their_peak_is_the_walks(phase: str, spare: int) -> None:
    c = step_case(phase, spare)
    assert c.violations() == []
    planned = next(p for p in c.plan.phases if p.phase == phase)
    peak_nbytes = max(moment.nbytes for moment in planned.moments)
    assert c.violations(budget_nbytes=peak_nbytes) == []
    assert c.rules(budget_nbytes=peak_nbytes - 1) == {"budget"}


def test_with_room_copies_are_spread_and_with_none_they_are_waited_for_at_once() -> None:
    """A copy has the calls around it to hide behind; with no room it starts and ends at one stop."""

    def stops(spare: int) -> list[tuple[int, int]]:
        found = []
        for phase, begin, end in (("forward", WRITE_BACK, EVICT), ("backward", PREFETCH, WAIT)):
            line = next(p for p in step_case(phase, spare).plan.phases if p.phase == phase).stops
            for storage in (FIRST, SECOND):
                at = {e.kind: i for i, stop in enumerate(line) for e in stop if e.item == storage}
                found.append((at[begin], at[end]))
        return found

    tight, wide = stops(0), stops(1 << 20)
    assert all(end - begin <= wide_end - wide_begin for (begin, end), (wide_begin, wide_end) in zip(tight, wide))
    assert all(wide_begin < wide_end for wide_begin, wide_end in wide)


Sabotage = Callable[[Case], Any]
BY_RULE: dict[tuple[str, str], dict[str, Sabotage]] = {
    ("saved", "forward"): {
        "one_that_stays_leaves": lambda c: c.options.update(offloaded=frozenset({FIRST.name})),
        "one_that_leaves_stays": lambda c: c.options.update(offloaded=AWAY | {"forward.2:0"}),
        "it_is_copied_before_its_last_reader": lambda c: c.call("forward.1").prepend(c.the(WRITE_BACK, FIRST)),
        "it_is_given_up_without_a_copy": lambda c: c.erase(WRITE_BACK, FIRST),
        "it_is_waited_for_before_its_copy": lambda c: c.the(WRITE_BACK, FIRST).prepend(c.the(WAIT, FIRST)),
        "it_is_given_up_before_its_copy_is_done": lambda c: c.the(WAIT, FIRST).prepend(c.the(EVICT, FIRST)),
        "it_is_given_up_without_waiting": lambda c: c.erase(WAIT, FIRST),
        "it_is_given_up_twice": lambda c: again(c, c.the(EVICT, FIRST)),
        "it_leaves_twice": lambda c: again(c, c.the(WRITE_BACK, FIRST)),
        "its_copy_is_waited_for_twice": lambda c: again(c, c.the(WAIT, FIRST)),
        "only_a_part_of_it_is_copied": lambda c: change(c.the(WRITE_BACK, FIRST), nbytes=99),
        "another_link_is_waited_for": lambda c: change(c.the(WAIT, FIRST), link=TO_DISK),
    },
    ("link", "forward"): {
        "it_goes_home_by_another_link": lambda c: change(c.the(WRITE_BACK, FIRST), link=TO_DISK),
    },
    ("saved", "backward"): {
        "it_is_waited_for_twice": lambda c: again(c, c.the(WAIT, FIRST)),
        "another_one_arrives_in_its_place": lambda c: change(c.the(WAIT, FIRST), storage=SECOND),
        "it_comes_back_twice": lambda c: again(c, c.the(PREFETCH, FIRST)),
        "it_has_too_little_room": lambda c: change(c.the(PREFETCH, FIRST), nbytes=60),
    },
    ("link", "backward"): {
        "it_comes_back_by_another_link": lambda c: change(c.the(PREFETCH, FIRST), link=FROM_DISK),
    },
    ("budget", "backward"): {  # all at the very beginning, where the plan has just the room for one call
        "it_comes_back_while_there_is_no_room": lambda c: c.call("backward.0").prepend(c.the(PREFETCH, FIRST)),
    },
}
SABOTAGES: dict[str, tuple[str, str, Sabotage]] = {
    name: (*rule, break_it) for rule, rows in BY_RULE.items() for name, break_it in rows.items()
}


def sabotage(rule: str, phase: str) -> Callable[[Sabotage], Sabotage]:
    def register(function: Sabotage) -> Sabotage:
        SABOTAGES[function.__name__] = (rule, phase, function)
        return function

    return register


def again(c: Case, node: fx.Node) -> None:
    """A second such node behind one."""
    with c.graph.inserting_after(node):
        c.graph.call_function(node.target, node.args)


def change(node: fx.Node, **arguments: Any) -> None:
    """Arguments of a node by `link` or `nbytes`."""
    places = {"storage": 0, "link": 1, "nbytes": 2}
    args = list(node.args)
    for name, value in arguments.items():
        args[places[name]] = value
    node.args = tuple(args)


@sabotage("saved", "forward")
def it_is_returned_as_well(c: Case) -> None:
    output = next(iter(reversed(c.graph.nodes)))
    value = c.the(EVICT, FIRST).args[1]
    output.args = ((*output.args[0], value),)


@sabotage("saved", "forward")
def another_storage_is_copied_for_it(c: Case) -> None:
    one, other = c.the(WRITE_BACK, FIRST), c.the(EVICT, SECOND).args[1]
    one.args = (*one.args, other)
    c.call("forward.2").append(one)
    one.append(c.the(EVICT, FIRST))
    one.append(c.the(WAIT, FIRST))


@sabotage("saved", "forward")
def nothing_stands_for_it(c: Case) -> None:
    output, left = next(iter(reversed(c.graph.nodes))), c.the(EVICT, FIRST)
    output.args = (tuple(value for value in output.args[0] if value not in left.users),)


@sabotage("end", "forward")
def it_is_never_waited_for(c: Case) -> None:
    left = c.the(EVICT, FIRST)
    for user in list(left.users):
        user.replace_all_uses_with(left.args[1])
        c.graph.erase_node(user)
    c.graph.erase_node(left)
    c.erase(WAIT, FIRST)


@sabotage("saved", "backward")
def it_is_read_without_a_copy(c: Case) -> None:
    arrived = c.the(WAIT, FIRST)
    (value,) = arrived.users
    (stand_in,) = c.the(PREFETCH, FIRST).args[3:]
    value.replace_all_uses_with(stand_in)


@sabotage("saved", "backward")
def it_comes_back_from_what_stands_for_another(c: Case) -> None:
    one, other = c.the(PREFETCH, FIRST), c.the(PREFETCH, SECOND)
    one.args, other.args = (*one.args[:3], *other.args[3:]), (*other.args[:3], *one.args[3:])


@sabotage("end", "backward")
def it_comes_back_and_never_arrives(c: Case) -> None:
    node = c.the(PREFETCH, FIRST)
    last = c.the(WAIT, FIRST)
    (value,) = last.users
    (stand_in,) = node.args[3:]
    value.replace_all_uses_with(stand_in)
    c.graph.erase_node(value)
    c.graph.erase_node(last)


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_sabotage_is_reported_by_its_rule(name: str) -> None:
    rule, phase, break_it = SABOTAGES[name]
    c = step_case(phase)
    assert c.violations() == []
    break_it(c)
    assert rule in c.rules(), c.violations()


def test_the_forward_gives_stand_ins_and_the_backward_takes_them() -> None:
    """By position: what stands for `x1` is returned where `x1` was."""
    c = step_case("forward")
    returned = next(iter(reversed(c.graph.nodes))).args[0]
    kinds = [getattr(v.args[0], "target", None) if v.target is operator.getitem else None for v in returned]
    assert kinds[2:4] == [chunk_ops.evict] * 2
    assert [v.args[0].args[0] for v in returned[2:4]] == [SECOND, FIRST]
    assert returned[1].args[0].target != chunk_ops.evict


def test_what_must_stay_is_no_candidate() -> None:
    program = forward_program()
    with pytest.raises(AssertionError, match="only candidates"):
        with_offloaded(program, {"forward.3:0"})  # the user's output
    assert with_offloaded(program, ()) is program
    kept = with_offloaded(backward_program(), AWAY).holding(frozenset({"x1", "x3"}))
    assert kept.held == backward_program().held | {"forward.2:0"}
    assert replace(kept, held=backward_program().held) == with_offloaded(backward_program(), AWAY)
