"""Choose the resident groups and the offloaded storages; `timeline` plans the data that moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from chunkc.ir.errors import BudgetError
from chunkc.ir.items import Copy, Item, MovedId
from chunkc.ir.layout import CASTS, GRAD, Chunk, ChunkLayout
from chunkc.ir.plan import Position
from chunkc.passes.planning.offload import Saved, choose
from chunkc.passes.planning.room import Room, everything, replicated_nbytes, tightest
from chunkc.passes.planning.step_profile import StepProfile


def chunk_items(layout: ChunkLayout, positions: Sequence[Position], resident: frozenset[int]) -> dict[MovedId, Item]:
    """Describe every chunk, or part of one, that the positions need."""
    shared: dict[tuple[str, int, int], Item] = {}  # equal items are one object
    items: dict[MovedId, Item] = {}
    for chunk in dict.fromkeys(chunk for position in positions for chunk in position.items):
        key = chunk.kind, chunk.group, -1 if chunk.part is None else chunk.part[1] - chunk.part[0]
        if key not in shared:
            shared[key] = _chunk_item(layout, chunk, resident)
        items[chunk] = shared[key]
    return items


def _chunk_item(layout: ChunkLayout, chunk: Chunk, resident: frozenset[int]) -> Item:
    nbytes, (back, home) = layout.chunk_nbytes_of(chunk), layout.links_of_chunk(chunk)
    group = layout.groups[chunk.group]
    if group.is_gathered(chunk):  # a gradient's slot begins empty: each rank's shard is at home, and is added to
        whole_nbytes = group.gathered_numel * group.dtype.itemsize
        gathered_nbytes = 0 if chunk.kind == GRAD else whole_nbytes
        return Item(nbytes, Copy(back, gathered_nbytes), Copy(home, whole_nbytes))
    if chunk.kind in CASTS:
        return Item(nbytes, Copy(back, layout.read_for_cast_nbytes(chunk, resident)), Copy(home, 0))
    return Item(nbytes, Copy(back), Copy(home))


@dataclass(frozen=True)
class ResidentData:
    """Resident model data by kind; gradients by parameter.

    Replicated data counts with the parameters.
    """

    parameter_nbytes: int
    state_nbytes: int
    gradients: Mapping[str, int]

    @staticmethod
    def of(layout: ChunkLayout, resident: frozenset[int]) -> ResidentData:
        specs = [*layout.small, *(s.spec for index in sorted(resident) for s in layout.groups[index].slices)]
        counters = layout.small_nbytes - sum(spec.nbytes + spec.training_nbytes for spec in layout.small)
        return ResidentData(
            sum(spec.nbytes for spec in specs) + replicated_nbytes(layout),
            sum(spec.optimizer_nbytes for spec in specs) + counters,
            {spec.name: spec.gradient_nbytes for spec in specs if spec.trainable},
        )


def moving_only(position: Position, resident: frozenset[int]) -> Position:
    """Return the position without the chunks of resident groups."""
    if all(chunk.has_own_slot(resident) for chunk in position.items):
        return position

    def keep(chunks: frozenset[Chunk]) -> frozenset[Chunk]:
        return frozenset(chunk for chunk in chunks if chunk.has_own_slot(resident))

    return replace(position, reads=keep(position.reads), writes=keep(position.writes))


def choose_resident(positions: Sequence[Position], room: Room, allowed: frozenset[int]) -> frozenset[int]:
    """Choose the resident groups: all if they fit, else as many as leave room to move, in `evenly_spread` order.

    The room's own residents are ignored.
    """
    needs, whole = tightest(positions), everything(room.layout)
    if allowed == whole and room.keeping(whole).fits(needs):
        return whole
    return _widened(needs, room.keeping(frozenset()), allowed, Room.with_resident).resident


def choose_replicated(positions: Sequence[Position], room: Room, allowed: frozenset[int]) -> ChunkLayout:
    """Choose the sharded groups to replicate: all if they fit, else as many as leave room to move.

    The order is `choose_resident`'s. The layout's own choice, and residents, are ignored. All inputs are equal on all
    ranks, so all ranks choose alike.
    """
    needs, layout, room = tightest(positions), room.layout, room.keeping(frozenset())
    every = room.of_layout(layout.with_replicated(allowed))
    if every.fits(needs):
        return every.layout

    def with_replicated(room: Room, index: int) -> Room:
        groups = room.layout.groups
        groups = (*groups[:index], every.layout.groups[index], *groups[index + 1 :])
        nbytes = room.fixed_nbytes + groups[index].replicated_nbytes
        return replace(room, layout=replace(room.layout, groups=groups), fixed_nbytes=nbytes)

    widest = _widened(needs, room.of_layout(layout.with_replicated(())), allowed, with_replicated)
    return layout.with_replicated(widest.layout.replicated_by_choice)


def _widened(
    positions: Sequence[Position], room: Room, groups: Iterable[int], widen: Callable[[Room, int], Room]
) -> Room:
    """Widen a room by as many of the groups as leave room to move, in `evenly_spread` order."""
    room = room.with_slack(positions)
    for index in evenly_spread(groups):
        wider = widen(room, index)
        if wider.fits(positions):
            room = wider
    return room


def evenly_spread(groups: Iterable[int]) -> list[int]:
    """Order groups so that every prefix is spread over all of them, the first used group first.

    Moving groups are then spread over the step as well: a link that is idle while residents are used cannot make up for
    it later. Van der Corput's sequence: by the binary digits of their places, backwards.
    """
    placed = sorted(groups)
    width = len(placed).bit_length()
    places = sorted(range(len(placed)), key=lambda place: f"{place:0{width}b}"[::-1])
    return [placed[place] for place in places]


def remaining_replicated(positions: Sequence[Position], room: Room) -> ChunkLayout:
    """Keep as many replicated groups as fit without residents: all of them if there is room."""
    replicated = room.layout.replicated_by_choice
    if not replicated or room.keeping(frozenset()).fits(tightest(positions)):
        return room.layout
    return choose_replicated(positions, room, replicated)


def remaining_residents(positions: Sequence[Position], room: Room) -> frozenset[int]:
    """Keep as many of the room's residents as fit: all of them if there is room, else as `choose_resident`.

    Raises:
        BudgetError: there is no room even without residents.
    """
    try:
        room.check_minimum(positions)
        return room.resident
    except BudgetError as error:
        with_residents = error
    try:
        room.keeping(frozenset()).check_minimum(positions)
    except BudgetError as error:
        raise min(error, with_residents, key=lambda error: error.minimum_nbytes) from None
    finally:
        del with_residents  # the error refers to this frame, which would refer to the error
    return choose_resident(positions, room, room.resident)


def choose_offloaded(saved: Sequence[Saved], kept: StepProfile, least_nbytes: int, room: Room) -> frozenset[str]:
    """Choose saved storages to offload so that every call has room with its residents, and copies too if possible.

    Args:
        saved: the candidates.
        kept: the step without offloading.
        least_nbytes: its bytes for values and chunks with these residents, if all candidates are offloaded.
    """
    with_slack = room.with_slack(kept.passes)
    if least_nbytes <= with_slack.left_nbytes:
        room = with_slack
    rooms = [room.left_nbytes - room.moving_nbytes(position) for position in kept.passes]
    return choose(saved, kept.forward, kept.backward, rooms)
