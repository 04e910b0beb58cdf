"""Plan the optimizer's step: cut chunk groups into tiles, give them room, schedule their copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
    not. Of two stages the second goes backwards: it begins with the data that the first has left in slots.
    """
    tiles = []
    for index in groups:
        group = layout.groups[index]
        numel = tile_numel(layout, group, capacity_nbytes)
        parts = [(at, min(at + numel, group.numel)) for at in range(0, group.numel, numel)]
        for stage in range(num_stages):
            tiles += [Tile(index, *part, stage, num_stages) for part in (reversed(parts) if stage else parts)]
    return tuple(tiles)


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
        stage = update_stages(group.update_kinds, tile.num_stages)[tile.stage]
        reads, writes = (
            frozenset(Chunk(kind, tile.group, (tile.begin, tile.end)) for kind in kinds)
            for kinds in (stage.reads, stage.writes)
        )
        positions.append(
            Position(
                name=f"{UPDATE}.{tile}",
                phase=UPDATE,
                non_model_nbytes=external_nbytes + group.update_workspace_nbytes(tile.end - tile.begin),
                op="optimizer update",
                module=group.slices[0].spec.name.rpartition(".")[0],
                reads=reads,
                writes=writes,
                cost_s=0.0 if hardware is None else pace_s(layout, tile, hardware),
            )
        )
    return tuple(positions)


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
