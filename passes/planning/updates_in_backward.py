"""Insert updates into a backward: a group is updated between two calls, as soon as its gradients are complete.

Parameters and gradients of a group that moves are in slots then, where the backward has put them; only the optimizer's
states are copied for it. A group's update comes after the last call that reads its parameters or computes one of its
gradients, so nothing reads the old parameters afterwards, and the gradients are consumed: they do not go home, unless
the update may be undone. If the states of one tile do not fit with the values alive there, the group is left to the
optimizer's step. So no budget becomes too small.

A resident group is updated at the same place, in place, if its layout counts it as transient: its gradients wait from
the call that computes them to the update, and take no room before and after.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import GRAD, PARAM, Chunk, ChunkGroup, ChunkLayout
from chunkc.ir.plan import Position, Tile, gradients_at
from chunkc.passes.planning.room import Room
from chunkc.passes.planning.update_seconds import tile_s
from chunkc.passes.planning.updates import MIN_TILE_NUMEL, TilePart, group_tiles, tile_numel, update_position

MAX_TILE_NUMEL = 1 << 22
"""Most elements of a tile. Tiles of an optimizer's step may be larger: here tiles run between calls that need the room,
and a smaller tile is gone, and the next one there, sooner."""


def with_waiting(backward: Sequence[Position], layout: ChunkLayout) -> tuple[Position, ...]:
    """Add to each call of a backward the gradients of transient groups that wait for their update."""
    if not layout.transient:
        return tuple(backward)
    waiting_at: list[list[tuple[int, int]]] = [[] for _ in backward]
    for group in _waiting(backward, layout):
        for at, nbytes in enumerate(group.during, group.first):
            waiting_at[at].append((group.index, nbytes))
    return tuple(
        replace(call, waiting=tuple(waiting)) if waiting else call for call, waiting in zip(backward, waiting_at)
    )


@dataclass(frozen=True)
class _Waiting:
    """A group with gradients that wait from the call `first` to the update after the call `last`.

    Attributes:
        during, after: their bytes while each of these calls runs, and once it is over.
    """

    index: int
    first: int
    last: int
    during: tuple[int, ...]
    after: tuple[int, ...]


def _waiting(backward: Sequence[Position], layout: ChunkLayout) -> Iterator[_Waiting]:
    """Yield the transient groups that get all their gradients here."""
    group_of = layout.group_of()
    first: dict[int, int] = {}
    for at, position in enumerate(backward):
        for name, _ in position.sunk:
            if (index := group_of.get(name)) in layout.transient:
                first.setdefault(index, at)
    for last, groups in _last_uses(backward, layout, {*layout.transient}).items():
        for index in groups:
            gradients = {s.spec.name: s.spec.gradient_nbytes for s in layout.groups[index].slices}
            during, after = zip(*gradients_at(backward[first[index] : last + 1], gradients))
            yield _Waiting(index, first[index], last, during, after)


def with_updates(
    backward: Sequence[Position],
    room: Room,
    updates: Mapping[int, int],
    *,
    undoable: Collection[int] = (),
    hardware: Hardware,
) -> tuple[Position, ...]:
    """Insert the positions of updates into a backward's positions.

    Args:
        updates: groups that may be updated, each with the stages of its update (see `chunkc.ir.updates`). Updated are
            moving groups that get all their gradients in this backward, if their update fits; and all resident
            transient groups. Sharded groups are not: their slots hold the shards of all ranks, and this rank's
            gradients alone.
        undoable: those of them that keep their gradients.
    """
    layout, resident = room.layout, room.resident
    if not updates and not layout.transient:
        return tuple(backward)
    last = _last_uses(backward, layout, {*updates} - resident - layout.cut)
    waiting = [group for group in _waiting(backward, layout) if group.index in resident] if layout.transient else []
    positions: list[Position] = []
    for at, position in enumerate(backward):
        positions.append(position)
        left = [(group.index, group.after[at - group.first]) for group in waiting if group.first <= at <= group.last]
        for group in [group for group in waiting if group.last == at]:
            positions.append(_in_place(layout.groups[group.index], tuple(left), position, hardware))
            left.remove((group.index, group.after[-1]))
        still_waiting = tuple(left)
        for index in last.get(at, ()):
            after = replace(position, waiting=still_waiting)
            tiles = _update(room, index, updates[index], after, hardware)
            positions += [replace(tile, keeps_gradients=True) for tile in tiles] if index in undoable else tiles
    return tuple(positions)


def updated_in(positions: Iterable[Position]) -> frozenset[int]:
    """Return the groups with updates among the positions."""
    return frozenset(position.tile.group for position in positions if position.tile is not None)


def _last_uses(backward: Sequence[Position], layout: ChunkLayout, groups: set[int]) -> dict[int, list[int]]:
    """Return index of a position -> the groups with their last use there, if all their gradients are computed."""
    sunk = {name for position in backward for name, _ in position.sunk}
    last = {item.group: at for at, position in enumerate(backward) for item in position.items}
    groups_at: dict[int, list[int]] = {}
    for index in sorted(groups & last.keys()):
        if all(s.spec.name in sunk for s in layout.groups[index].slices):
            groups_at.setdefault(last[index], []).append(index)
    return groups_at


def _in_place(group: ChunkGroup, waiting: tuple[tuple[int, int], ...], after: Position, hardware: Hardware) -> Position:
    """Return the update of a resident group, after a call: nothing moves for it."""
    part = TilePart(Tile(group.index, 0, group.numel), frozenset(), frozenset())
    consumed = tuple(s.spec.name for s in group.slices)
    cost_s = tile_s(group, part.tile, hardware)
    return update_position(group, part, after.phase, after.left_nbytes, cost_s, waiting, consumed)


def _update(room: Room, index: int, num_stages: int, after: Position, hardware: Hardware) -> list[Position]:
    """Return a group's update after a call, in tiles; empty if not even the smallest tile fits.

    Tiles leave room to fetch one and write one back while a third is updated.
    """

    def positions(numel: int, end: int) -> list[Position]:
        phase, held_nbytes, waiting = after.phase, after.left_nbytes, after.waiting
        return [
            update_position(group, part, phase, held_nbytes, tile_s(group, part.tile, hardware), waiting)
            for part in _parts(index, group.update_kinds, numel, end, num_stages)
        ]

    group = room.layout.groups[index]
    smallest = min(MIN_TILE_NUMEL, group.numel)
    if not room.fits(positions(smallest, smallest)):
        return []
    whole_nbytes = sum(group.slot_nbytes(Chunk(kind, index)) for kind in (PARAM, GRAD))
    spare_nbytes = room.left_nbytes - after.left_nbytes - after.waiting_nbytes(room.resident) - whole_nbytes
    return positions(tile_numel(room.layout, group, spare_nbytes, MAX_TILE_NUMEL), group.numel)


@lru_cache(maxsize=1 << 10)
def _parts(index: int, kinds: tuple[str, ...], numel: int, end: int, num_stages: int) -> tuple[TilePart, ...]:
    """Cut a group's update into tiles; parameters and gradients are whole, as the backward has them.

    A search repeats the same arguments many times.
    """
    return tuple(TilePart.of(tile, kinds, (PARAM, GRAD)) for tile in group_tiles(index, numel, end, num_stages))
