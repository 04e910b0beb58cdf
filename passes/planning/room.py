"""Count the bytes that positions take on the compute tier, and those that a budget leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chunkc.ir.errors import VALUES, BudgetError
from chunkc.ir.layout import Chunk, ChunkLayout
from chunkc.ir.plan import Position

SLACK_CHUNKS = 2
"""Chunks of room for copies under way that residents may not take: one arriving, one leaving."""


def fixed_nbytes(layout: ChunkLayout, resident: frozenset[int]) -> int:
    """Return the permanent bytes on the compute tier, once every gradient and state exists: model data and overhead."""
    residents = (group_nbytes(layout, index) for index in resident)
    return layout.overhead_nbytes + layout.small_nbytes + replicated_nbytes(layout) + sum(residents)


def group_nbytes(layout: ChunkLayout, index: int) -> int:
    """Return the permanent bytes of a resident group."""
    group = layout.groups[index]
    transient_nbytes = sum(s.spec.gradient_nbytes for s in group.slices) if index in layout.transient else 0
    return group.resident_nbytes - transient_nbytes


def replicated_nbytes(layout: ChunkLayout) -> int:
    """Return the bytes of replicated data of sharded groups."""
    return sum(group.replicated_nbytes for group in layout.groups)


def everything(layout: ChunkLayout) -> frozenset[int]:
    """Return every group."""
    return frozenset(group.index for group in layout.groups)


def tightest(positions: Sequence[Position]) -> list[Position]:
    """Keep, of positions that need the same chunks, the one with the most other bytes: if it fits, all of them do."""
    found: dict[tuple[frozenset[Chunk], tuple[tuple[int, int], ...]], Position] = {}
    for position in positions:
        key = position.items, position.waiting
        if position.non_model_nbytes > found.setdefault(key, position).non_model_nbytes:
            found[key] = position
    return list(found.values())


@dataclass(frozen=True)
class Room:
    """Room on the compute tier with these residents: of a position, what it needs, and what it leaves free for slots.

    Attributes:
        budget_nbytes: of all bytes there; 0 where only needs are asked for.
        external_nbytes: of values outside the positions.
        fixed_nbytes: permanent bytes, as the function of this name counts them.
    """

    layout: ChunkLayout
    budget_nbytes: int
    external_nbytes: int
    resident: frozenset[int]
    fixed_nbytes: int

    @staticmethod
    def of(
        layout: ChunkLayout,
        budget_nbytes: int = 0,
        external_nbytes: int = 0,
        resident: frozenset[int] = frozenset(),
    ) -> Room:
        """Return the room with these residents."""
        return Room(layout, budget_nbytes, external_nbytes, resident, fixed_nbytes(layout, resident))

    def keeping(self, resident: frozenset[int]) -> Room:
        """Return the room with these residents instead."""
        return Room.of(self.layout, self.budget_nbytes, self.external_nbytes, resident)

    def of_layout(self, layout: ChunkLayout) -> Room:
        """Return the room with another layout."""
        return Room.of(layout, self.budget_nbytes, self.external_nbytes, self.resident)

    def with_resident(self, index: int) -> Room:
        """Return the room with one more resident group."""
        nbytes = self.fixed_nbytes + group_nbytes(self.layout, index)
        return replace(self, resident=self.resident | {index}, fixed_nbytes=nbytes)

    def with_slack(self, positions: Sequence[Position]) -> Room:
        """Return the room that is left if `SLACK_CHUNKS` of the positions' largest chunks always have a slot."""
        chunks = dict.fromkeys(chunk for position in positions for chunk in position.items)
        slack_nbytes = SLACK_CHUNKS * max(map(self.layout.chunk_nbytes_of, chunks), default=0)
        return replace(self, budget_nbytes=self.budget_nbytes - slack_nbytes)

    @property
    def taken_nbytes(self) -> int:
        """Bytes that are taken at every position."""
        return self.fixed_nbytes + self.external_nbytes

    @property
    def left_nbytes(self) -> int:
        """Bytes that are left for positions and their chunks."""
        return self.budget_nbytes - self.taken_nbytes

    def free(self, position: Position) -> int:
        """Return the bytes that a position leaves free for slots; below zero, it does not fit without any."""
        return self.left_nbytes - position.non_model_nbytes - position.waiting_nbytes(self.resident)

    def moving_nbytes(self, position: Position) -> int:
        """Return the slot bytes that the position cannot do without, and waiting gradients."""
        nbytes_of, resident = self.layout.chunk_nbytes_of, self.resident
        slots = sum([nbytes_of(chunk) for chunk in position.items if chunk.has_own_slot(resident)])
        return slots + position.waiting_nbytes(resident)

    def needs(self, position: Position) -> int:
        """Return all bytes at a position, if only its own chunks have slots."""
        return self.taken_nbytes + position.non_model_nbytes + self.moving_nbytes(position)

    def needed_nbytes(self, positions: Sequence[Position]) -> int:
        """Return the bytes that the positions need on top of those that are taken at every one."""
        return max(map(self.needs, tightest(positions))) - self.taken_nbytes

    def fits(self, positions: Sequence[Position]) -> bool:
        """Whether each of the positions has the bytes that it needs."""
        return all(self.needs(position) <= self.budget_nbytes for position in positions)

    def minimum_nbytes(self, positions: Sequence[Position], *, all_may_be_resident: bool = False) -> int:
        """Return the smallest budget that works with these residents, or (see `check_minimum`) with all groups."""
        minimum = self.taken_nbytes + (self.needed_nbytes(positions) if positions else 0)
        if all_may_be_resident and positions:
            # Without the gaps between chunks, and optimizer tiles, a very small model may need less.
            whole = Room.of(self.layout, 0, self.external_nbytes, everything(self.layout))
            minimum = min(minimum, whole.minimum_nbytes(positions))
        return minimum

    def check_minimum(self, positions: Sequence[Position], *, all_may_be_resident: bool = False) -> int:
        """Return the smallest budget that works with these residents.

        With `all_may_be_resident` it may also be one that works with all groups resident.

        Raises:
            BudgetError: the budget is below it.
        """
        minimum = self.minimum_nbytes(positions, all_may_be_resident=all_may_be_resident)
        if positions and minimum > self.budget_nbytes:
            raise self._lacking(max(tightest(positions), key=self.needs), minimum)
        return minimum

    def _lacking(self, worst: Position, minimum_nbytes: int) -> BudgetError:
        """Return the error of a position that does not fit."""
        layout, own = self.layout, [chunk for chunk in worst.items if chunk.has_own_slot(self.resident)]
        contents = [
            (VALUES, worst.non_model_nbytes),
            (
                "parameters on the compute tier, with gradients and optimizer states",
                self.fixed_nbytes - layout.overhead_nbytes,
            ),
            ("workspaces of libraries, and the allocator's rounding of them", layout.overhead_nbytes),
            ("values of earlier calls that are still held", self.external_nbytes),
            *((f"chunk {chunk} ({_title(layout, chunk)})", layout.chunk_nbytes_of(chunk)) for chunk in sorted(own)),
        ]
        return BudgetError(
            minimum_nbytes=minimum_nbytes,
            budget_nbytes=self.budget_nbytes,
            moment=f"{worst.op} ({worst.name})",
            module=worst.module,
            call=worst.name,
            contents=sorted(((k, n) for k, n in contents if n), key=lambda item: -item[1]),
        )


def _title(layout: ChunkLayout, chunk: Chunk) -> str:
    return layout.groups[chunk.group].title
