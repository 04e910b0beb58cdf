"""Who leaves where room is short: the same items as by looking at every one at every call, but in a moment."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

import pytest

from chunkc.ir.hardware import Hardware
from chunkc.ir.items import Copy, Item
from chunkc.ir.layout import Chunk
from chunkc.ir.links import FROM_DISK, TO_DEVICE, TO_DISK, TO_HOME, LinkSpec
from chunkc.ir.plan import Position
from chunkc.passes.planning.eviction import residency

Span = tuple[Chunk, int, int, bool]

MACHINE = Hardware(
    1.0, 1.0, (LinkSpec(TO_DEVICE, 4.0), LinkSpec(TO_HOME, 4.0), LinkSpec(FROM_DISK, 1.0), LinkSpec(TO_DISK, 1.0))
)
"""A disk is four times slower than RAM."""

SLOW_TO_START = Hardware(1.0, 1.0, (LinkSpec(TO_DEVICE, 1.0, 3.0), LinkSpec(TO_HOME, 1.0)))


def in_ram(nbytes: int) -> Item:
    return Item(nbytes, Copy(TO_DEVICE), Copy(TO_HOME))


def on_disk(nbytes: int) -> Item:
    return Item(nbytes, Copy(FROM_DISK), Copy(TO_DISK))


def position(reads: frozenset[Chunk], writes: frozenset[Chunk] = frozenset()) -> Position:
    return Position("call", "forward", 0, "op", "", reads, writes, 1.0)


def by_looking(
    positions: Sequence[Position], items: Mapping[Chunk, Item], capacity: Sequence[int], machine: Hardware
) -> list[Span]:
    """The rule as it is said: the cheapest to bring back per byte and call goes, by name among equals; what need not
    have gone stays."""

    def cost(chunk: Chunk, index: int) -> float:
        """Of the seconds per byte and call; nothing if it is never needed again."""
        later = next((i for i in range(index, len(positions)) if chunk in positions[i].items), 10**9)
        item = items[chunk]
        return round(item.way_back.seconds(item.nbytes, machine) / item.nbytes, 12) / (later - index)

    present: dict[Chunk, Span] = {}
    closed: list[Span] = []
    for index, at in enumerate(positions):
        by_name = sorted(present.keys() - at.items, reverse=True)
        leaving: list[Chunk] = []

        def nbytes(at: Position = at, leaving: list[Chunk] = leaving) -> int:
            return sum(items[c].nbytes for c in (present.keys() | at.items) - set(leaving))

        for chunk in sorted(by_name, key=lambda chunk: cost(chunk, index)):
            if nbytes() > capacity[index]:
                leaving.append(chunk)
        for chunk in reversed(leaving[:]):
            if nbytes() + items[chunk].nbytes <= capacity[index]:
                leaving.remove(chunk)
        closed += [present.pop(chunk) for chunk in leaving]
        for chunk in at.items:
            _, first, _, dirty = present.get(chunk, (chunk, index, index, False))
            present[chunk] = (chunk, first, index, dirty or chunk in at.writes)
    return sorted([*closed, *present.values()], key=lambda span: (span[1], span[0]))


@pytest.mark.parametrize("machine", [MACHINE, SLOW_TO_START], ids=["two rates", "a latency"])
@pytest.mark.parametrize("seed", range(60))
def test_as_by_looking_at_every_item(seed: int, machine: Hardware) -> None:
    rng = random.Random(seed)
    chunks = [Chunk("param", index) for index in range(rng.randint(2, 12))]
    ways = (in_ram, on_disk) if machine is MACHINE else (in_ram,)
    items = {chunk: rng.choice(ways)(rng.choice([1, 1, 1, 2, 5])) for chunk in chunks}
    positions = []
    for _ in range(rng.randint(1, 40)):
        needed = rng.sample(chunks, rng.randint(0, min(3, len(chunks))))
        cut = rng.randint(0, len(needed))
        positions.append(position(frozenset(needed[:cut]), frozenset(needed[cut:])))
    capacity = [sum(items[chunk].nbytes for chunk in at.items) + rng.randint(0, 8) for at in positions]
    found = [(i.item, i.first, i.last, i.dirty) for i in residency(positions, items, capacity, machine)]
    assert found == by_looking(positions, items, capacity, machine)


def test_time_grows_with_the_calls_not_with_their_square() -> None:
    """Items that stay throughout must not be looked at again at every call."""

    def seconds(num: int) -> float:
        once = [position(frozenset({Chunk("param", index)})) for index in range(num)]
        again = [position(at.reads) for at in reversed(once)]
        items = {Chunk("param", index): in_ram(1) for index in range(num)}
        begin = time.process_time()
        residency([*once, *again], items, [num // 2] * (2 * num), MACHINE)
        return time.process_time() - begin

    assert seconds(20_000) < 2
