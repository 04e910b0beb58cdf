"""Which saved storages may go home, and which do."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from chunkc.ir.plan import Position
from chunkc.ir.program import PhaseProgram, SegmentCall
from chunkc.passes.memory.profile import last_holds
from chunkc.passes.planning.offload import SMALL_NBYTES, Saved, candidates, choose, with_offloaded

BIG = SMALL_NBYTES


def call(name: str, inputs: str, outputs: str, storages: str) -> SegmentCall:
    return SegmentCall(
        name, "s", tuple(inputs.split()), tuple(outputs.split()), tuple(storages.split()), (), (), "m", 1.0
    )


def programs() -> tuple[PhaseProgram, PhaseProgram]:
    """a is large, v a view of it; b is the user's; c is small; d is a view of the input; e is odd; f is not read."""
    forward = PhaseProgram(
        "forward",
        {"x": "in:x"},
        {"in:x": BIG, "A": BIG, "B": BIG, "C": SMALL_NBYTES - 1, "E": BIG, "F": BIG},
        frozenset({"in:x"}),
        {},
        (
            call("forward.0", "x", "a b", "A B"),
            call("forward.1", "a", "v c", "A C"),
            call("forward.2", "v", "e f d", "E F in:x"),
        ),
        ("b", "a", "b", "v", "c", "d", "e", "f"),
        1,
        plain=frozenset("abvcdf"),
    )
    backward = PhaseProgram(
        "backward",
        {"a": "A", "b": "B", "v": "A", "c": "C", "d": "in:x", "e": "E", "f": "F", "t": "in:t"},
        {"A": BIG, "B": BIG, "C": SMALL_NBYTES - 1, "E": BIG, "F": BIG, "in:x": BIG, "in:t": 4},
        frozenset({"in:x", "B"}),
        {},
        (call("backward.0", "t b c e", "g", "backward.0:0"), call("backward.1", "g v", "h", "backward.1:0")),
        ("h",),
        1,
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
