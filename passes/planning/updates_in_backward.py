"""Updates in a backward: a group is updated between two calls, as soon as its gradients are complete.

Parameters and gradients of a group that moves are in slots then, where the backward has put them; only the optimizer's
states travel for it. A group's update comes behind the last call that reads its parameters or makes one of its
gradients, so nothing reads the old parameters afterwards, and the gradients are used up: they do not go home, unless
the update may be undone. Where the states of one tile do not fit beside what is alive there, the group is left to the
optimizer's step. So no budget becomes too small.

A group that stays on the compute tier is updated at the same place, where it is, if its layout counts it among those
whose gradients are spent: these wait there from when they are made to the update, and take no room before and after.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import GRAD, PARAM, Chunk, ChunkGroup, ChunkLayout
from chunkc.ir.plan import Position, Tile
from chunkc.ir.updates import tile_traffic, update_stages
from chunkc.passes.planning.residency import fixed_nbytes
from chunkc.passes.planning.updates import MIN_TILE_NUMEL, tile_numel

MAX_TILE_NUMEL = 1 << 22
"""A tile's most elements. Those of an optimizer's step may be larger: here tiles stand between calls that need the
room, and one that is smaller is gone, and the next one there, sooner."""


def with_waiting(backward: Sequence[Position], layout: ChunkLayout) -> tuple[Position, ...]:
    """A backward's calls, each with the gradients that wait for the update of a group whose gradients are spent.

    A gradient that may not stay where its call has put it is copied: it counts beside that call, too.
    """
    if not layout.transient:
        return tuple(backward)
    found: list[list[tuple[int, int]]] = [[] for _ in backward]
    for group in _waiting(backward, layout):
        for at, nbytes in enumerate(group.beside, group.first):
            found[at].append((group.index, nbytes))
    return tuple(replace(one, waiting=tuple(waiting)) if waiting else one for one, waiting in zip(backward, found))


@dataclass(frozen=True)
class _Waiting:
    """A group whose gradients wait from the call `first` to the update behind the call `last`.

    Attributes:
        beside, after: bytes of them while each of these calls runs, and once it is over.
    """

    index: int
    first: int
    last: int
    beside: tuple[int, ...]
    after: tuple[int, ...]


def _waiting(backward: Sequence[Position], layout: ChunkLayout) -> Iterator[_Waiting]:
    """The groups whose gradients are spent, and are all made here."""
    made: dict[int, list[tuple[int, int, bool]]] = {}  # group -> (call, bytes, handed over) of each gradient
    specs, group_of = layout.specs(), layout.group_of()
    for at, position in enumerate(backward):
        for name, handed_over in position.sunk:
            if (index := group_of.get(name)) in layout.transient:
                made.setdefault(index, []).append((at, specs[name].gradient_nbytes, handed_over))
    for last, groups in _last_uses(backward, layout, {*layout.transient}).items():
        for index in groups:
            first = min(at for at, _, _ in made[index])
            beside, after, complete = [], [], 0
            for at in range(first, last + 1):
                own = [(nbytes, handed_over) for call, nbytes, handed_over in made[index] if call == at]
                beside.append(complete + sum(nbytes for nbytes, handed_over in own if not handed_over))
                complete += sum(nbytes for nbytes, _ in own)
                after.append(complete)
            yield _Waiting(index, first, last, tuple(beside), tuple(after))


def with_updates(
    backward: Sequence[Position],
    layout: ChunkLayout,
    updates: Mapping[int, int],
    *,
    undoable: Collection[int] = (),
    budget_nbytes: int,
    external_nbytes: int,
    resident: frozenset[int],
    hardware: Hardware,
) -> tuple[Position, ...]:
    """A backward's positions with those of updates between them.

    Args:
        updates: groups that may be updated, each with the stages of its update (see `chunkc.ir.updates`). Those are
            updated that move, all of whose gradients this backward makes, and whose update fits; and all that stay and
            whose gradients are spent. Groups that are cut over ranks are not: in their slots are all ranks' parts, and
            this rank's gradients alone.
        undoable: those of them whose gradients are not used up.
        external_nbytes: of others' values.
    """
    room_nbytes = budget_nbytes - fixed_nbytes(layout, resident) - external_nbytes
    last = _last_uses(backward, layout, {*updates} - resident - layout.cut)
    waiting = [group for group in _waiting(backward, layout) if group.index in resident] if layout.transient else []
    found: list[Position] = []
    for at, position in enumerate(backward):
        found.append(position)
        left = [(one.index, one.after[at - one.first]) for one in waiting if one.first <= at <= one.last]
        for one in [one for one in waiting if one.last == at]:
            found.append(_in_place(layout.groups[one.index], tuple(left), position, hardware))
            left.remove((one.index, one.after[-1]))
        beside = tuple(left)
        for index in last.get(at, ()):
            after = replace(position, waiting=beside)
            tiles = _update(layout, index, updates[index], after, room_nbytes, hardware)
            found += [replace(tile, keeps_gradients=True) for tile in tiles] if index in undoable else tiles
    return tuple(found)


def updated_in(positions: Iterable[Position]) -> frozenset[int]:
    """The groups whose updates are among the positions."""
    return frozenset(position.tile.group for position in positions if position.tile is not None)


def _last_uses(backward: Sequence[Position], layout: ChunkLayout, groups: set[int]) -> dict[int, list[int]]:
    """Index of a position -> those of the groups that no later one uses, if all their gradients are made."""
    sunk = {name for position in backward for name, _ in position.sunk}
    last = {item.group: at for at, position in enumerate(backward) for item in position.items}
    found: dict[int, list[int]] = {}
    for index in sorted(groups & last.keys()):
        if all(s.spec.name in sunk for s in layout.groups[index].slices):
            found.setdefault(last[index], []).append(index)
    return found


def _in_place(group: ChunkGroup, waiting: tuple[tuple[int, int], ...], after: Position, hardware: Hardware) -> Position:
    """The update of a group that stays, behind the call `after`: nothing moves for it."""
    tile = Tile(group.index, 0, group.numel)
    return Position(
        name=f"update.{tile}",
        phase=after.phase,
        non_model_nbytes=after.left_nbytes,
        op="optimizer update",
        module=group.slices[0].spec.name.rpartition(".")[0],
        reads=frozenset(),
        writes=frozenset(),
        cost_s=tile_traffic(group, tile).nbytes / hardware.update_bytes_per_s,
        left_nbytes=after.left_nbytes,
        tile=tile,
        waiting=waiting,
        consumed=tuple(s.spec.name for s in group.slices),
    )


def _update(
    layout: ChunkLayout, index: int, num_stages: int, after: Position, room_nbytes: int, hardware: Hardware
) -> list[Position]:
    """A group's update behind a call, in tiles such that one can be fetched and one written back beside the one
    updated; nothing where not even the smallest one fits."""

    def positions(numel: int, end: int) -> list[Position]:
        return [_position(group, part, after, hardware) for part in _parts(index, kinds, numel, end, num_stages)]

    group, sizes = layout.groups[index], layout.chunk_nbytes_of
    kinds = group.update_kinds
    smallest, waiting_nbytes = min(MIN_TILE_NUMEL, group.numel), sum(nbytes for _, nbytes in after.waiting)
    room_nbytes -= waiting_nbytes
    if any(p.non_model_nbytes + sum(map(sizes, p.items)) > room_nbytes for p in positions(smallest, smallest)):
        return []
    spare_nbytes = room_nbytes - after.left_nbytes - sizes(Chunk(PARAM, index)) - sizes(Chunk(GRAD, index))
    return positions(tile_numel(layout, group, spare_nbytes, MAX_TILE_NUMEL), group.numel)


@dataclass(frozen=True)
class _Part:
    """One tile of an update, and the chunks that it needs: parameters and gradients whole, as the backward has them."""

    tile: Tile
    reads: frozenset[Chunk]
    writes: frozenset[Chunk]


@lru_cache(maxsize=1 << 10)
def _parts(index: int, kinds: tuple[str, ...], numel: int, end: int, num_stages: int) -> tuple[_Part, ...]:
    """A group's update in tiles of so many elements, in order. A search asks for the same ones many times."""

    def chunks(kinds: Iterable[str], part: tuple[int, int]) -> frozenset[Chunk]:
        return frozenset(Chunk(kind, index, None if kind in (PARAM, GRAD) else part) for kind in kinds)

    parts, found = [(at, min(at + numel, end)) for at in range(0, end, numel)], []
    for number, stage in enumerate(update_stages(kinds, num_stages)):
        for part in reversed(parts) if number else parts:
            tile = Tile(index, *part, number, num_stages)
            found.append(_Part(tile, chunks(stage.reads, part), chunks(stage.writes, part)))
    return tuple(found)


def _position(group: ChunkGroup, part: _Part, after: Position, hardware: Hardware) -> Position:
    """One tile behind the call `after`."""
    tile = part.tile
    return Position(
        name=f"update.{tile}",
        phase=after.phase,
        non_model_nbytes=after.left_nbytes + group.update_workspace_nbytes(tile.end - tile.begin),
        op="optimizer update",
        module=group.slices[0].spec.name.rpartition(".")[0],
        reads=part.reads,
        writes=part.writes,
        cost_s=tile_traffic(group, tile).nbytes / hardware.update_bytes_per_s,
        left_nbytes=after.left_nbytes,
        tile=tile,
        waiting=after.waiting,
    )
