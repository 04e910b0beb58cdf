"""The verifier: one sabotage after another is reported, by the rule that it breaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import fx
from verify_cases import LAYOUT, MEMORIES, Case, case, give

from chunkc.ir import chunk_ops
from chunkc.ir.layout import Chunk
from chunkc.ir.links import FROM_DISK, TO_DEVICE, TO_DISK, TO_HOME
from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK
from chunkc.ir.program import MemoryStep, SegmentMemory
from chunkc.ir.verify.verifier import verify_phase

Sabotage = Callable[[Case], Any]
P0, P1, G0, G1 = (Chunk(kind, group) for kind in ("param", "grad") for group in (0, 1))
ROOMY = 1 << 20
"""Bytes added to the smallest budget with which the backward of four layers updates all of them."""
BY_RULE: dict[tuple[str, str, int], dict[str, Sabotage]] = {
    ("read", "forward", 0): {
        "a_load_is_not_waited_for": lambda c: c.erase(WAIT, P1),
        "a_slot_goes_before_its_reader": lambda c: move_before(c.the(EVICT, P1), c.call("forward.1")),
        "a_chunk_is_never_loaded": lambda c: erase(c, P1, PREFETCH, WAIT, EVICT),
        "a_parameter_is_read_from_the_chunk_of_another": lambda c: give(c.the("parameter", P1), P1, "h.2.w"),
    },
    ("read", "forward", 1 << 20): {
        "a_view_is_read_after_its_chunk_came_back_into_another_slot": lambda c: c.add_before(
            c.call("forward.1"), (EVICT, P1), (PREFETCH, P1), (WAIT, P1)
        ),
    },
    ("read", "backward", 0): {
        "what_the_forward_kept_is_not_there": lambda c: c.options.update(present=()),
    },
    ("read", "update", 0): {
        "an_update_before_its_gradients_have_arrived": lambda c: c.erase(WAIT, part_of(c, PREFETCH, G1)),
    },
    ("read", "casting", 0): {
        "a_cast_is_read_from_the_chunk_of_another": lambda c: give(
            c.the("parameter", Chunk("param_bf16", 1)), Chunk("param_bf16", 1), "h.2.w"
        ),
        "a_cast_is_not_waited_for": lambda c: c.erase(WAIT, Chunk("param_bf16", 1)),
    },
    ("write", "casting", 0): {
        "a_cast_is_written_back": lambda c: c.add_before(
            c.the(EVICT, Chunk("param_bf16", 1)), (WRITE_BACK, Chunk("param_bf16", 1))
        ),
    },
    ("update", "updating", ROOMY): {
        "an_update_comes_before_the_gradient": lambda c: move_before(update_of(c, 1), c.the("sink", G1)),
        "a_gradient_that_was_used_up_is_fetched": lambda c: c.add_after(c.the(EVICT, G1), (PREFETCH, G1), (WAIT, G1)),
    },
    ("dirty", "updating", ROOMY): {
        "a_gradient_is_given_up_before_the_update": lambda c: move_before(c.the(EVICT, G1), update_of(c, 1)),
        "an_update_leaves_a_part_of_the_gradient_out": lambda c: give(update_of(c, 1), 1, 0, 512),
        "a_gradient_that_an_update_may_need_again_does_not_go_home": lambda c: c.options.update(
            undoable=frozenset({1})
        ),
    },
    ("write", "updating", ROOMY): {
        "a_group_is_not_updated": lambda c: c.graph.erase_node(update_of(c, 1)),
        "states_are_not_waited_for": lambda c: c.erase(WAIT, Chunk("exp_avg", 1, (0, 1024))),
    },
    ("write", "backward", 0): {
        "a_gradient_goes_into_a_slot_that_is_not_ready": lambda c: c.erase(WAIT, G1),
        "a_gradient_is_sunk_during_the_write_back": lambda c: move_before(c.the(WRITE_BACK, G1), c.the("sink", G1)),
        "a_gradient_goes_into_a_slot_that_is_not_there": lambda c: erase(c, G1, PREFETCH, WAIT),
        "a_gradient_goes_into_the_chunk_of_another": lambda c: give(
            c.the("sink", G1), "h.2.w", *c.the("sink", G1).args[1:]
        ),
    },
    ("slot", "forward", 4096): {
        "a_slot_goes_while_its_load_is_under_way": lambda c: move_before(c.the(EVICT, P1), c.the(WAIT, P1)),
    },
    ("slot", "backward", 0): {
        "a_slot_goes_while_its_write_back_is_under_way": lambda c: c.erase(WAIT, G1, 1),
        "a_write_back_is_waited_for_as_if_it_were_a_load": lambda c: give(c.all(WAIT, G1)[-1], G1, TO_DEVICE),
    },
    ("dirty", "backward", 0): {
        "a_gradient_is_never_written_back": lambda c: c.erase(WRITE_BACK, G1),
    },
    ("dirty", "update", 0): {
        "new_parameters_are_never_written_back": lambda c: c.graph.erase_node(
            next(n for n in c.all(WRITE_BACK) if n.args[0].whole == P1)
        ),
    },
    ("state", "forward", 1 << 20): {
        "a_chunk_is_loaded_twice": lambda c: c.add_after(c.the(PREFETCH, P1), (PREFETCH, P1)),
    },
    ("state", "backward", 0): {
        "a_write_back_of_nothing": lambda c: c.add_after(c.the(EVICT, G1), (WRITE_BACK, G1)),
        "two_write_backs_at_once": lambda c: c.add_after(c.the(WRITE_BACK, G1), (WRITE_BACK, G1)),
    },
    ("state", "forward", 0): {
        "a_wait_for_nothing": lambda c: c.add_after(c.the(EVICT, P0), (WAIT, P0)),
        "a_slot_goes_twice": lambda c: c.add_after(c.the(EVICT, P0), (EVICT, P0)),
    },
    ("link", "forward", 0): {
        "a_wait_for_a_copy_that_was_waited_for": lambda c: c.add_after(c.the(WAIT, P1), (WAIT, P1)),
        "a_load_names_no_link": lambda c: give(c.the(PREFETCH, P1), P1),
        "a_load_by_the_disk_s_link_of_what_is_in_ram": lambda c: relink(c, P1, FROM_DISK, PREFETCH, WAIT),
        "a_load_is_waited_for_on_another_link": lambda c: relink(c, P1, TO_HOME, WAIT),
    },
    ("link", "backward", 0): {
        "a_gradient_is_written_to_a_disk_that_is_not_its_home": lambda c: relink(c, G1, TO_DISK, WRITE_BACK),
    },
    ("budget", "backward", 0): {
        "one_byte_less": lambda c: c.options.update(budget_nbytes=c.options["budget_nbytes"] - 1),
        "a_resident_that_nobody_counted": lambda c: c.options.update(resident={0}),
        "a_load_starts_too_early": lambda c: [
            move_before(c.the(PREFETCH, chunk), c.call("backward.0")) for chunk in (P0, G0)
        ],
    },
    ("budget", "update", 0): {
        "one_byte_more_of_others": lambda c: c.options.update(external_nbytes=c.options["external_nbytes"] + 1),
    },
    ("end", "forward", 0): {
        "what_should_be_kept_is_given_back": lambda c: c.add_before(last(c), (EVICT, next(iter(c.options["kept"])))),
        "more_is_kept_than_should_be": lambda c: c.options.update(kept=()),
    },
    ("home", "settling", 0): {
        "a_group_is_settled_before_its_gradient_is_made": lambda c: move_before(settled(c, 1), c.call("backward.1")),
        "a_group_is_settled_before_its_gradient_leaves": lambda c: move_before(settled(c, 1), c.the(WRITE_BACK, G1)),
        "a_parameter_is_fetched_after_its_group_was_settled": lambda c: c.add_after(
            settled(c, 1), (PREFETCH, P1), (WAIT, P1), (EVICT, P1)
        ),
        "a_gradient_comes_back_after_its_group_was_settled": lambda c: c.add_after(
            c.the(EVICT, G1), (PREFETCH, G1), (WAIT, G1), (EVICT, G1)
        ),
    },
}
SABOTAGES: dict[str, tuple[str, str, int, Sabotage]] = {
    name: (*rule, break_it) for rule, rows in BY_RULE.items() for name, break_it in rows.items()
}


def sabotage(rule: str, phase: str, spare: int = 0) -> Callable[[Sabotage], Sabotage]:
    def register(function: Sabotage) -> Sabotage:
        SABOTAGES[function.__name__] = (rule, phase, spare, function)
        return function

    return register


def move_before(node: fx.Node, other: fx.Node) -> None:
    other.prepend(node)


def erase(c: Case, chunk: Chunk, *kinds: str) -> None:
    for kind in kinds:
        c.erase(kind, chunk)


def relink(c: Case, chunk: Chunk, link: str, *kinds: str) -> None:
    for kind in kinds:
        give(c.the(kind, chunk), chunk, link)


def last(c: Case) -> fx.Node:
    return next(iter(reversed(c.graph.nodes)))


def part_of(c: Case, kind: str, whole: Chunk) -> Chunk:
    """Return the chunk of the first such event for a part of another chunk."""
    return next(n.args[0] for n in c.all(kind) if n.args[0].whole == whole)


@sabotage("read", "forward")
def a_result_is_a_view_of_a_slot(c: Case) -> None:
    memory = MEMORIES["layer"]
    c.call("forward.1").target = "view"
    c.names["view"] = SegmentMemory(memory.steps, memory.input_released, (-2,), ())  # type: ignore[assignment]


def update_of(c: Case, group: int) -> fx.Node:
    return next(n for n in c.all("update") if n.args[0] == group)


@sabotage("update", "updating", ROOMY)
def a_call_reads_what_was_updated(c: Case) -> None:
    call = c.call("backward.3")
    call.args = (*call.args[:2], c.the("parameter", P1))


@sabotage("write", "updating", ROOMY)
def a_group_is_updated_twice(c: Case) -> None:
    node = update_of(c, 1)
    with c.graph.inserting_after(node):
        c.graph.call_function(chunk_ops.update, node.args)


@sabotage("write", "update")
def an_update_during_the_write_back_of_a_state(c: Case) -> None:
    node = c.all("update")[1]
    move_before(c.the(WRITE_BACK, part_of(c, WRITE_BACK, Chunk("exp_avg", 1))), node)


@sabotage("write", "update")
def an_update_without_its_parameters(c: Case) -> None:
    chunk = part_of(c, PREFETCH, P1)
    for node in [n for kind in (PREFETCH, WAIT, WRITE_BACK, EVICT) for n in c.all(kind, chunk)]:
        c.graph.erase_node(node)


@sabotage("write", "update")
def an_update_of_other_elements(c: Case) -> None:
    node = c.all("update")[0]
    node.args = (node.args[0], 0, 512)


@sabotage("dirty", "backward")
def a_second_gradient_comes_after_the_write_back(c: Case) -> None:
    sink, evict = c.the("sink", G1), c.the(EVICT, G1)
    with c.graph.inserting_before(evict):
        c.graph.call_function(chunk_ops.sink, sink.args)


@sabotage("overlap", "forward", 1 << 20)
def a_part_of_a_chunk_is_loaded_beside_the_whole(c: Case) -> None:
    part = Chunk("param", 1, (0, 8))
    c.add_after(c.the(WAIT, P1), (PREFETCH, part), (WAIT, part), (EVICT, part))


@sabotage("overlap", "update", 1 << 20)
def two_parts_that_overlap_are_there_at_once(c: Case) -> None:
    wait = next(n for n in c.all(WAIT) if n.args[0].whole == Chunk("exp_avg", 1))
    _, end = wait.args[0].part
    part = Chunk("exp_avg", 1, (end - 1, end))
    c.add_after(wait, (PREFETCH, part), (WAIT, part), (EVICT, part))


@sabotage("state", "forward")
def something_that_is_no_chunk_operation(c: Case) -> None:
    with c.graph.inserting_before(c.call("forward.0")):
        c.graph.call_function(torch.relu, ())


@sabotage("budget", "backward")
def a_value_is_read_again_later(c: Case) -> None:
    """The first gradient is still read by a later call: it lives on."""
    gradient, late = c.the("sink", Chunk("grad", 3)).args[2], c.call("backward.3")
    late.args = (gradient, *late.args[1:])


@sabotage("budget", "backward")
def a_call_needs_more_than_planned(c: Case) -> None:
    memory = MEMORIES["layer_backward"]
    more = (MemoryStep("mm", "h", 4197), *memory.steps[1:])
    c.names["layer_backward"] = SegmentMemory(more, memory.input_released, memory.outputs, memory.storage_nbytes)  # type: ignore[assignment]


@sabotage("end", "backward", 1 << 20)
def the_end_comes_during_a_write_back(c: Case) -> None:
    c.options["kept"] = {G0}
    c.erase(EVICT, G0)
    c.erase(WAIT, G0, 1)


@sabotage("end", "backward", 1 << 20)
def the_end_leaves_a_dirty_chunk(c: Case) -> None:
    c.options["kept"] = {G0}
    for node in (c.the(EVICT, G0), c.the(WAIT, G0, 1), c.the(WRITE_BACK, G0)):
        c.graph.erase_node(node)


@sabotage("end", "forward", 1 << 20)
def the_end_comes_during_a_load(c: Case) -> None:
    c.options["kept"] = {*c.options["kept"], G0}
    c.add_before(last(c), (PREFETCH, G0))


def settled(c: Case, group: int) -> fx.Node:
    return next(n for n in c.all("settle") if n.args == (group,))


@pytest.mark.parametrize("name", SABOTAGES)
def test_sabotage_is_reported_by_its_rule(name: str) -> None:
    rule, phase, spare, break_it = SABOTAGES[name]
    subject = case(phase, spare)
    assert subject.violations() == []
    break_it(subject)
    memories: Mapping[str, Any] = MEMORIES | subject.names
    found = verify_phase(subject.graph, layout=LAYOUT, memories=memories, **subject.options)
    assert any(violation.startswith(rule) for violation in found), found or "nothing was reported"


def test_every_rule_of_the_verifier_is_sabotaged() -> None:
    from chunkc.ir.verify import verifier as verify

    rules = {line.split()[0] for line in (verify.__doc__ or "").splitlines() if line.startswith("    ")}
    assert rules == {rule for rule, *_ in SABOTAGES.values()}
