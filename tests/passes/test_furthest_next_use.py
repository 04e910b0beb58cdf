"""Eviction by furthest next use: the same victims as by looking at every chunk at every call, but in a moment."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

import pytest

from chunkc.ir.plan import Position
from chunkc.passes.schedule import furthest_next_use

Span = tuple[str, int, int, bool]


def position(index: int, reads: frozenset[str], writes: frozenset[str]) -> Position:
    return Position(f"forward.{index}", "forward", 0, "op", "", reads, writes, 1.0)


def by_looking(positions: Sequence[Position], sizes: Mapping[str, int], capacity: Sequence[int]) -> list[Span]:
    """The rule as it is said: where room is short, what is used furthest in the future goes, by name among equals."""

    def next_use(chunk: str, index: int) -> float:
        later = (i for i in range(index, len(positions)) if chunk in positions[i].chunks)
        return next(later, float("inf"))

    present: dict[str, Span] = {}
    closed: list[Span] = []
    for index, at in enumerate(positions):
        for chunk in sorted(
            present.keys() - at.chunks, key=lambda chunk: (next_use(chunk, index), chunk), reverse=True
        ):
            if sum(sizes[c] for c in present.keys() | at.chunks) > capacity[index]:
                closed.append(present.pop(chunk))
        for chunk in at.chunks:
            _, first, _, dirty = present.get(chunk, (chunk, index, index, False))
            present[chunk] = (chunk, first, index, dirty or chunk in at.writes)
    return sorted([*closed, *present.values()], key=lambda span: (span[1], span[0]))


@pytest.mark.parametrize("seed", range(60))
def test_as_by_looking_at_every_chunk(seed: int) -> None:
    rng = random.Random(seed)
    chunks = [f"param:{index}" for index in range(rng.randint(2, 12))]
    sizes = {chunk: rng.choice([1, 1, 1, 2, 5]) for chunk in chunks}
    positions = []
    for index in range(rng.randint(1, 40)):
        needed = rng.sample(chunks, rng.randint(0, min(3, len(chunks))))
        cut = rng.randint(0, len(needed))
        positions.append(position(index, frozenset(needed[:cut]), frozenset(needed[cut:])))
    capacity = [sum(sizes[chunk] for chunk in at.chunks) + rng.randint(0, 8) for at in positions]
    found = [(i.chunk, i.first, i.last, i.dirty) for i in furthest_next_use(positions, sizes, capacity)]
    assert found == by_looking(positions, sizes, capacity)


def test_time_grows_with_the_calls_not_with_their_square() -> None:
    """Chunks that stay throughout must not be looked at again at every call."""

    def seconds(num: int) -> float:
        once = [position(index, frozenset({f"param:{index}"}), frozenset()) for index in range(num)]
        again = [position(num + index, at.reads, frozenset()) for index, at in enumerate(reversed(once))]
        sizes = {f"param:{index}": 1 for index in range(num)}
        begin = time.process_time()
        furthest_next_use([*once, *again], sizes, [num // 2] * (2 * num))
        return time.process_time() - begin

    assert seconds(20_000) < 2
