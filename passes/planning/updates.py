"""Plan the optimizer's step: cut chunk groups into tiles, give them room, schedule their copies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import Chunk, ChunkGroup, ChunkLayout
from chunkc.ir.plan import Plan, Position, Tile
from chunkc.ir.program import UPDATE
from chunkc.ir.updates import update_stages
from chunkc.passes.planning.room import Room
from chunkc.passes.planning.timeline import plan_phases
from chunkc.passes.planning.update_seconds import pace_s

MIN_TILE_NUMEL, MAX_TILE_NUMEL = 1 << 16, 1 << 24
"""Bounds on an update's elements: below, events cost more than the update; above, nothing is gained."""

MAX_GROUP_TILES, MAX_STEP_TILES = 32, 1536
"""Most tiles of a group, and of a step, if larger tiles have room: planning time does not grow with the model."""

TILES_AT_ONCE = 3
"""Tiles with slots: one arriving, one being updated, one leaving."""


def update_tiles(
    layout: ChunkLayout, groups: Sequence[int], capacity_nbytes: int, num_stages: int = 1
) -> tuple[Tile, ...]:
    """Cut the groups into tiles, such that one can be fetched and one written back while one is updated.

    An update is elementwise, and sums are cut where all tiles may end, so tiles may depend on the budget; results do
    not.
    """
    tiles = []
    for group in (layout.groups[index] for index in groups):
        tiles += group_tiles(group.index, tile_numel(layout, group, capacity_nbytes), group.numel, num_stages)
    return tuple(tiles)


def group_tiles(index: int, numel: int, end: int, num_stages: int) -> list[Tile]:
    """Cut the first `end` elements of a group into tiles of `numel`, in the order of their updates.

    Of two stages the second goes backwards: it begins with the data that the first has left in slots.
    """
    parts = [(at, min(at + numel, end)) for at in range(0, end, numel)]
    stages = [reversed(parts) if stage else parts for stage in range(num_stages)]
    return [Tile(index, *part, stage, num_stages) for stage, in_order in enumerate(stages) for part in in_order]


def tile_numel(layout: ChunkLayout, group: ChunkGroup, capacity_nbytes: int, most_numel: int = MAX_TILE_NUMEL) -> int:
    """Return the elements of a tile, such that `TILES_AT_ONCE` fit if possible.

    There are more than `most_numel` only if there would be too many tiles otherwise.
    """
    fitting = capacity_nbytes // (group.update_nbytes_per_element * TILES_AT_ONCE)
    num_tiles = min(MAX_GROUP_TILES, max(1, MAX_STEP_TILES // len(layout.groups)))
    largest = max(most_numel, -(-group.numel // num_tiles))
    return max(MIN_TILE_NUMEL, min(largest, fitting) // MIN_TILE_NUMEL * MIN_TILE_NUMEL)


def smallest_tiles(layout: ChunkLayout, groups: Sequence[int], num_stages: int = 1) -> tuple[Tile, ...]:
    """Return one tile of each group, of the smallest size: the least room that the group's update needs.

    Of a sharded group, a tile of the largest shards: all ranks choose alike.
    """
    return tuple(
        Tile(index, 0, min(MIN_TILE_NUMEL, layout.groups[index].largest_numel), stage, num_stages)
        for index in groups
        for stage in range(num_stages)
    )


def smallest_update(
    layout: ChunkLayout, groups: Sequence[int], external_nbytes: int, num_stages: int = 1
) -> tuple[Position, ...]:
    """Return the positions of `smallest_tiles`: if they fit, groups can be updated in slots.

    Larger tiles are cut only if they fit too.
    """
    return update_positions(layout, smallest_tiles(layout, groups, num_stages), external_nbytes)


def update_positions(
    layout: ChunkLayout, tiles: Sequence[Tile], external_nbytes: int, hardware: Hardware | None = None
) -> tuple[Position, ...]:
    """Return the optimizer's step as positions: each tile needs all chunks of its stage at the same time.

    With `hardware` positions take the time until the next one may follow; without it, if only room is computed, none.
    """
    positions = []
    for tile in tiles:
        group = layout.groups[tile.group]
        part = TilePart.of(tile, group.update_kinds)
        cost_s = 0.0 if hardware is None else pace_s(layout, tile, hardware)
        positions.append(update_position(group, part, UPDATE, external_nbytes, cost_s))
    return tuple(positions)


@dataclass(frozen=True)
class TilePart:
    """A tile of an update, and the chunks that its stage needs."""

    tile: Tile
    reads: frozenset[Chunk]
    writes: frozenset[Chunk]

    @staticmethod
    def of(tile: Tile, kinds: tuple[str, ...], whole: Collection[str] = ()) -> TilePart:
        """Return a tile with its chunks: of the `whole` kinds the group's whole chunk, of others the tile's part."""
        stage = update_stages(kinds, tile.num_stages)[tile.stage]

        def chunks(kinds: Sequence[str]) -> frozenset[Chunk]:
            return frozenset(
                Chunk(kind, tile.group, None if kind in whole else (tile.begin, tile.end)) for kind in kinds
            )

        return TilePart(tile, chunks(stage.reads), chunks(stage.writes))


def update_position(
    group: ChunkGroup,
    part: TilePart,
    phase: str,
    held_nbytes: int,
    cost_s: float,
    waiting: tuple[tuple[int, int], ...] = (),
    consumed: tuple[str, ...] = (),
) -> Position:
    """Return the position of a tile's update, in the optimizer's step or between two calls of a backward.

    Args:
        held_nbytes: of values that are alive meanwhile.
        waiting, consumed: as of a `Position`.
    """
    tile = part.tile
    return Position(
        name=f"{UPDATE}.{tile}",
        phase=phase,
        non_model_nbytes=held_nbytes,
        op="optimizer update",
        module=group.slices[0].spec.name.rpartition(".")[0],
        reads=part.reads,
        writes=part.writes,
        cost_s=cost_s,
        left_nbytes=held_nbytes,
        tile=None if phase == UPDATE else tile,
        waiting=waiting,
        consumed=consumed,
    )


def plan_update(
    room: Room, groups: Sequence[int], *, hardware: Hardware, num_stages: int
) -> tuple[Plan, tuple[Tile, ...]]:
    """Plan an optimizer's step that updates some groups in slots, with a moment for each of its tiles.

    External bytes count with each of them.

    Raises:
        BudgetError: there is no plan within the budget.
    """
    tiles = update_tiles(room.layout, groups, room.left_nbytes, num_stages)
    positions = update_positions(room.layout, tiles, room.external_nbytes, hardware)
    return plan_phases([(UPDATE, positions)], replace(room, external_nbytes=0), hardware=hardware), tiles
