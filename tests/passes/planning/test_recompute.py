"""Storages that a forward drops and its backward makes again: every call gets the values it always got. Which saved
storages may go home, and which do.
"""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from program_cases import phase_program, segment_call
from torch import fx

from chunkc.ir.plan import Position
from chunkc.ir.program import RECOMPUTE, MemoryStep, PhaseProgram, SegmentCall, SegmentMemory
from chunkc.passes.memory.profile import last_holds, positions
from chunkc.passes.planning.offload import SMALL_NBYTES, Saved, candidates, choose, with_offloaded
from chunkc.passes.planning.recompute import Recomputable, may_recompute, with_recompute
from chunkc.passes.planning.recompute_search import (
    RecomputeRegions,
    dropped_between,
    leanest,
    needed_before_region,
    ways_to_cut,
)
from chunkc.passes.planning.step_profile import StepProfile

BIG = SMALL_NBYTES
aten = torch.ops.aten


def random_programs(seed: int) -> tuple[PhaseProgram, PhaseProgram, frozenset[str]]:
    """A forward with views, parameters and a user's output, its backward, and segments that may not run again."""
    rng = random.Random(seed)
    inputs = {"x": "in:x", "w": "in:w", "b": "in:b"}
    storages = {"in:x": BIG, "in:w": 0, "in:b": 8}
    storage_of = dict(inputs)
    calls = []
    for at in range(rng.randint(3, 9)):
        known = [value for value in storage_of if value not in ("w",)]
        read = [*dict.fromkeys(rng.choices(known[-6:], k=rng.randint(1, 3))), *(["w"] if rng.random() < 0.5 else [])]
        outputs, made = [], []
        for number in range(rng.randint(1, 3)):
            value = f"v{at}_{number}"
            views = [storage_of[v] for v in read if v != "w"]
            storage = rng.choice(views) if rng.random() < 0.25 else f"forward.{at}:{number}"
            storages.setdefault(storage, rng.choice([BIG, 3 * BIG]))
            outputs.append(value)
            made.append(storage)
        parameters = tuple((place, "m.w") for place, value in enumerate(read) if value == "w")
        segment = f"s{rng.randrange(4)}"
        calls.append(segment_call(f"forward.{at}", read, outputs, made, segment, parameters=parameters))
        storage_of.update(zip(outputs, made))
    values = [value for call in calls for value in call.outputs]
    calls = [without_some_results(call, rng) if rng.random() < 0.6 else call for call in calls]
    user, saved = values[-1], [v for v in [*values, "x", "w"] if rng.random() < 0.7]
    held = frozenset(inputs.values())
    forward = phase_program(
        "forward", inputs, storages, calls, (user, *saved), parameters={"w": "m.w"}, changing=frozenset({"b"}),
        plain=frozenset(v for v in values if rng.random() < 0.95),
    )  # fmt: skip
    taken = {f"s_{value}": value for value in saved}
    behind = {name: storage_of[value] for name, value in taken.items()} | {"t": "in:t"}
    names, backward_calls = [*(name for name in taken if name != "s_w"), "t"], []
    for at in range(rng.randint(1, 6)):
        read = rng.choices([*names[-8:], "t"], k=4)
        backward_calls.append(segment_call(f"backward.{at}", dict.fromkeys(read), f"g{at}", f"backward.{at}:0", "back"))
        names.append(f"g{at}")
    back_storages = {s: storages.get(s, BIG) for s in {*behind.values(), *held, storage_of[user]}} | {
        f"backward.{i}:0": BIG for i in range(6)
    }
    parameters = {"s_w": "m.w"} if "s_w" in taken else {}
    backward = phase_program(
        "backward", behind, back_storages, backward_calls, (f"g{len(backward_calls) - 1}",),
        held=held | {storage_of[user], "in:t"}, parameters=parameters, saved_as=taken,
    )  # fmt: skip
    return forward, backward, frozenset({"s0"})


def reads(place: int, num_inputs: int) -> list[int]:
    """Which of a call's inputs its result at a place depends on."""
    return [at for at in range(num_inputs) if at == 0 or (at + place) % 2]


def without_some_results(call: SegmentCall, rng: random.Random) -> SegmentCall:
    """The call, and what a backward may repeat of it: some of the results, of the inputs that these depend on."""
    places = [place for place in range(len(call.outputs)) if rng.random() < 0.6]
    if not places:
        return call
    inputs = sorted({at for place in places for at in reads(place, len(call.inputs))})
    again = replace(
        call,
        segment=f"{call.segment} {inputs} {places} of {len(call.inputs)}",
        inputs=tuple(call.inputs[at] for at in inputs),
        outputs=tuple(call.outputs[place] for place in places),
        output_storages=tuple(call.output_storages[place] for place in places),
        parameters=tuple((inputs.index(at), name) for at, name in call.parameters if at in inputs),
    )
    return replace(call, recompute_call=again)


def places_of(call: SegmentCall) -> tuple[str, list[int], list[int], int]:
    """A call's segment; of that one's inputs and results, those that the call has; and how many inputs there are."""
    if "of" not in call.segment:
        return call.segment, list(range(len(call.inputs))), list(range(len(call.outputs))), len(call.inputs)
    whole, inputs, places, count = re.fullmatch(r"(\w+) (\[.*\]) (\[.*\]) of (\d+)", call.segment).groups()
    return whole, json.loads(inputs), json.loads(places), int(count)


def run(program: PhaseProgram, given: Mapping[str, str]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """The program on values that are texts of how they came about; and what each call read."""
    values, read = dict(given), {}
    for call in program.calls:
        args = tuple(values[value] for value in call.inputs)
        read[call.name] = args
        segment, inputs, places, count = places_of(call)
        for place, value, storage in zip(places, call.outputs, call.output_storages, strict=True):
            read_by = [args[inputs.index(at)] for at in reads(place, count)]
            values[value] = f"{segment}({', '.join(read_by)})[{place}]"
            for position, name in enumerate(program.remade.get(storage, ()) if program.phase == "backward" else ()):
                values.setdefault(name, f"absent {storage} {position}")
                made = REMADE.get((storage, position))
                if made is not None:
                    values[name] = made
    return values, read


REMADE: dict[tuple[str, int], str] = {}
"""(storage, which of its saved values) -> the forward's value, of the programs under test."""


@pytest.mark.parametrize("seed", range(150))
def test_every_call_gets_the_values_it_always_got(seed: int) -> None:
    forward, backward, once = random_programs(seed)
    rng = random.Random(seed)
    values, _ = run(forward, {name: name for name in forward.inputs})
    saved = forward.outputs[1:]
    expected_values = {name: values[v] for name, v in backward.saved_as.items()} | {"t": "t"}
    _, expected = run(backward, expected_values)
    known = Recomputable(forward, backward, once)
    every = sorted(known.droppable | known.inner)
    for gone in (frozenset(every), frozenset(s for s in every if rng.random() < 0.5)):
        lean, behind = with_recompute(known, gone)
        dropped = set(lean.remade)
        assert dropped <= gone
        assert {call.segment for call in behind.calls if call.name.startswith("rerun")}.isdisjoint(once)
        kept = lean.outputs[len(lean.outputs) - lean.num_extra :]
        assert not any(value in forward.changing for value in kept)
        # What was saved, less what was dropped, and the extra values are all that the backward has.
        storage_of = forward.value_storages
        given = {n: values[v] for n, v in backward.saved_as.items() if storage_of[v] not in dropped} | {"t": "t"}
        given |= dict(zip(list(behind.inputs)[len(backward.inputs) :], (values[v] for v in kept)))
        REMADE.clear()
        REMADE.update({(s, i): values[v] for s, names in lean.remade.items() for i, v in enumerate(names)})
        _, read = run(behind, given)
        assert {name: args for name, args in read.items() if name in expected} == expected
        for call in behind.calls:
            if call.name.startswith("rerun"):
                source = next(c for c in forward.calls if c.name.partition(".")[2] == call.name.partition(".")[2])
                assert read[call.name] == tuple(values[source.inputs[at]] for at in places_of(call)[1])
        assert len({call.name for call in behind.calls}) == len(behind.calls)
        assert [v for v in lean.outputs[1 : 1 + len(saved)] if v] == [v for v in saved if storage_of[v] not in dropped]
        held = last_holds(behind)
        assert all(storage in behind.storages for storage in held)


@pytest.mark.parametrize("seed", range(60))
def test_a_step_without_what_is_at_home_needs_what_its_own_profile_says(seed: int) -> None:
    """`StepProfile.with_offloaded` takes bytes off where liveness finds them gone; others are dropped or not."""
    rng = random.Random(seed)
    known = Recomputable(*random_programs(seed))
    may_go = sorted(known.droppable | known.inner)
    programs = with_recompute(known, rng.sample(may_go, k=min(len(may_go), rng.randint(0, 3))))
    steps = tuple(MemoryStep("op", "m", rng.choice([0, 5, 9]) * BIG) for _ in range(3))
    memories = {
        name: SegmentMemory(steps, tuple(rng.randint(0, 3) for _ in range(9)), (), ())
        for name in sorted({call.segment for program in programs for call in program.calls})
    }

    def step(forward: PhaseProgram, backward: PhaseProgram) -> StepProfile:
        calls = (positions(program, memories, group_of={"m.w": 0}) for program in (forward, backward))
        return StepProfile(*calls, (), 0, 0)

    saved = [one for one in candidates(*programs) if rng.random() < 0.6]
    names = {one.storage for one in saved}
    expected, found = (
        step(*(with_offloaded(program, names) for program in programs)),
        step(*programs).with_offloaded(saved),
    )
    assert (found.forward, found.backward) == (expected.forward, expected.backward)


@pytest.mark.parametrize("seed", range(40))
def test_stretches_keep_what_crosses_their_ends(seed: int) -> None:
    forward, backward, once = random_programs(seed)
    known = Recomputable(forward, backward, once)
    for cuts in ways_to_cut(known):
        gone = dropped_between(known, RecomputeRegions(cuts))
        ends = [0, *cuts, len(forward.calls)]
        found = known.without(gone)
        for at in found.calls:
            begin = max(end for end in ends if end <= at)
            sources = [known.source(v, found.dropped) for v in forward.calls[at].inputs]
            assert all(source is None or source >= begin for source in sources)
    best = leanest(known, lambda gone: -len(gone))
    assert best is None or not best.kept
    assert dropped_between(known, best) <= known.droppable | known.inner


@pytest.mark.parametrize("seed", range(40))
def test_with_what_is_needed_early_kept_stretches_run_again_from_the_last_to_the_first(seed: int) -> None:
    forward, backward, once = random_programs(seed)
    known = Recomputable(forward, backward, once)
    for ends in ways_to_cut(known):
        _, repeated = with_recompute(
            known, dropped_between(known, RecomputeRegions(ends, needed_before_region(known, ends)))
        )
        last, at_once = len(ends), []
        for call in repeated.calls:
            if call.name.startswith(RECOMPUTE):
                at_once.append(bisect_right(ends, int(call.name.rpartition(".")[2])))
            elif at_once:
                assert max(at_once) <= last
                last, at_once = min(at_once), []


def layers(count: int, *, table: bool = False) -> Recomputable:
    """Like calls that save much. The first makes the table, if there is one, and all of the backward read it."""
    storages = (
        {"in:x0": BIG, "T": BIG} | {f"X{i + 1}": BIG for i in range(count)} | {f"S{i}": 9 * BIG for i in range(count)}
    )
    calls = tuple(segment_call(f"forward.{i}", f"x{i}", f"x{i + 1} s{i}", f"X{i + 1} S{i}", "s") for i in range(count))
    saved = tuple(f"s{i}" for i in range(count))
    if table:
        outputs, made = (*calls[0].outputs, "t"), (*calls[0].output_storages, "T")
        calls = (replace(calls[0], outputs=outputs, output_storages=made), *calls[1:])
        saved = (*saved, "t")
    read = ("t",) if table else ()
    behind = tuple(
        segment_call(f"backward.{i}", (f"s{count - 1 - i}", *read), f"g{i}", f"G{i}", "b") for i in range(count)
    )
    forward = phase_program("forward", {"x0": "in:x0"}, storages, calls, (f"x{count}", *saved), plain=frozenset(saved))
    inputs = {value: value.upper() for value in saved}
    behind_storages = {storage: storages[storage] for storage in inputs.values()} | {f"G{i}": BIG for i in range(count)}
    backward = phase_program(
        "backward", inputs, behind_storages, behind, (f"g{count - 1}",), held={f"X{count}"},
        saved_as={name: name for name in saved},
    )  # fmt: skip
    return Recomputable(forward, backward, frozenset())


def repeated_calls(known: Recomputable, recompute_regions: RecomputeRegions) -> list[str]:
    return [call.name for call in with_recompute(known, dropped_between(known, recompute_regions))[1].calls]


def test_each_block_is_a_stretch_of_its_own_or_several_are() -> None:
    """Twelve like calls: every one, every second, every third, ... ends a stretch."""
    known = layers(12)
    cuts = list(ways_to_cut(known))
    assert cuts[0] == tuple(range(1, 12))
    assert (1, 3, 5, 7, 9, 11) in cuts
    assert (2, 5, 8, 11) in cuts
    lean, _ = with_recompute(known, dropped_between(known, RecomputeRegions((4, 8))))
    assert lean.outputs[len(lean.outputs) - lean.num_extra :] == ("x0", "x4", "x8")
    names = repeated_calls(known, RecomputeRegions((4, 8)))
    assert names[:6] == ["rerun.8", "rerun.9", "rerun.10", "rerun.11", "backward.0", "backward.1"]
    assert names.index("rerun.7") == names.index("backward.4") - 1


def test_a_table_that_all_layers_read_does_not_have_the_first_run_again_before_the_last() -> None:
    known, ends = layers(4, table=True), (1, 2, 3)
    assert needed_before_region(layers(4), ends) == frozenset()
    assert needed_before_region(known, ends) == {"T"}
    assert repeated_calls(known, RecomputeRegions(ends))[:3] == ["rerun.0", "rerun.3", "backward.0"]
    names = repeated_calls(known, RecomputeRegions(ends, frozenset({"T"})))
    assert names[:2] == ["rerun.3", "backward.0"]
    assert names[-2:] == ["rerun.0", "backward.3"]


@pytest.mark.parametrize("best", [True, False])
def test_what_is_needed_early_is_kept_where_a_step_then_needs_less(best: bool) -> None:
    known = layers(4, table=True)
    found = leanest(known, lambda gone: len(gone) if best else -len(gone))
    assert found is not None
    assert found.kept == (frozenset({"T"}) if best else frozenset())


def test_a_part_of_a_model_may_be_one_stretch() -> None:
    """Its own backward needs no less for it, but what comes in between does."""
    known = layers(4)
    everything = dropped_between(known, RecomputeRegions())
    assert everything == {"S0", "S1", "S2", "S3", "X1", "X2", "X3"}
    assert leanest(known, lambda gone: -len(gone), is_part=True) == RecomputeRegions()
    assert leanest(known, lambda gone: -len(gone)) != RecomputeRegions()
    assert repeated_calls(known, RecomputeRegions())[:5] == [f"rerun.{i}" for i in range(4)] + ["backward.0"]
    assert dropped_between(known, None) == dropped_between(None, RecomputeRegions()) == frozenset()


def segment(*operations: tuple) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target, *args in operations:
        graph.call_function(target, (x, *args))
    return graph


def test_what_draws_random_numbers_or_changes_its_input_runs_once() -> None:
    assert may_recompute(segment((aten.mm.default, None), (aten.relu.default,)))
    assert not may_recompute(segment((aten.relu.default,), (aten.native_dropout.default, 0.1, True)))
    assert not may_recompute(segment((aten.add_.Tensor, 1)))
    assert not may_recompute(segment((torch.ops.higher_order.cond,)))
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert may_recompute(segment((attention, None, None)))
    assert may_recompute(segment((attention, None, None, 0.0)))
    assert not may_recompute(segment((attention, None, None, 0.1)))


# ---------------------------------------------------------------- storages that go home

BIG = SMALL_NBYTES


def programs() -> tuple[PhaseProgram, PhaseProgram]:
    """a is large, v a view of it; b is the user's; c is small; d is a view of the input; e is odd; f is not read."""
    forward = phase_program(
        "forward",
        {"x": "in:x"},
        {"in:x": BIG, "A": BIG, "B": BIG, "C": SMALL_NBYTES - 1, "E": BIG, "F": BIG},
        (
            segment_call("forward.0", "x", "a b", "A B"),
            segment_call("forward.1", "a", "v c", "A C"),
            segment_call("forward.2", "v", "e f d", "E F in:x"),
        ),
        "babvcdef",
        plain=frozenset("abvcdf"),
    )
    backward = phase_program(
        "backward",
        {"a": "A", "b": "B", "v": "A", "c": "C", "d": "in:x", "e": "E", "f": "F", "t": "in:t"},
        {"A": BIG, "B": BIG, "C": SMALL_NBYTES - 1, "E": BIG, "F": BIG, "in:x": BIG, "in:t": 4},
        (
            segment_call("backward.0", "t b c e", "g", "backward.0:0"),
            segment_call("backward.1", "g v", "h", "backward.1:0"),
        ),
        "h",
        held={"in:x", "B"},
    )
    return forward, backward


def test_only_large_storages_that_nobody_else_holds_may_leave() -> None:
    assert candidates(*programs()) == (Saved("A", BIG, 2, 1),)
    assert candidates(programs()[0], None) == ()


def test_what_the_user_gets_stays_whether_or_not_the_backward_counts_it_as_held() -> None:
    forward, backward = programs()
    assert candidates(forward, replace(backward, held=frozenset({"in:x"}))) == (Saved("A", BIG, 2, 1),)


def test_all_values_of_a_storage_leave_together() -> None:
    forward, backward = (with_offloaded(program, {"A"}) for program in programs())
    assert forward.outputs == ("b", None, "b", None, "c", "d", "e", "f")
    assert forward.copied == {"A": ("a", "v")}
    assert forward.stand_ins == {1: ("A", 0), 3: ("A", 1)}
    assert last_holds(forward)["A"] == 2
    assert backward.copied == {"A": ("a", "v")}
    assert backward.outputs == ("h",)


def _line(needs: list[int], phase: str) -> list[Position]:
    return [Position(f"{phase}.{i}", phase, n, "", "", frozenset(), frozenset(), 1.0) for i, n in enumerate(needs)]


@pytest.mark.parametrize("seed", range(20))
def test_no_more_leaves_than_is_needed(seed: int) -> None:
    """All calls have room, where they can; and none that leaves could stay."""
    rng, num = random.Random(seed), 6
    saved = [Saved(f"s{i}", rng.randint(1, 9), rng.randrange(num), rng.randrange(num)) for i in range(8)]
    made = {one.storage: rng.randint(0, one.last) for one in saved}
    freed = {one.storage: rng.randint(one.first, num - 1) for one in saved}

    def needs(away: frozenset[str]) -> list[int]:
        """Each call holds what it uses, and what is kept before and after that."""
        found = [5] * (2 * num)
        for one in saved:
            held = range(made[one.storage], num + freed[one.storage] + 1)
            for at in held:
                if one.storage not in away or at <= one.last or at >= num + one.first:
                    found[at] += one.nbytes
        return found

    most, least = max(needs(frozenset())), max(needs(frozenset(one.storage for one in saved)))
    forward, backward = _line(needs(frozenset())[:num], "forward"), _line(needs(frozenset())[num:], "backward")
    assert least < most
    for room in range(least, most + 1):
        away = choose(saved, forward, backward, [room] * (2 * num))
        assert max(needs(away)) <= room
        assert all(max(needs(away - {name})) > room for name in away)
    assert choose(saved, forward, backward, [most] * (2 * num)) == frozenset()
    far = Saved("far", 50, 0, num - 1)
    near = replace(far, storage="near", last=num - 1, first=0)
    assert choose([near, far], _line([60] * num, "f"), _line([60] * num, "b"), [60] + [20] * (2 * num - 2) + [60]) == {
        "far"
    }
