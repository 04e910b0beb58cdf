"""Choose the resident groups, the offloaded storages and the minimum budget; `timeline` plans the data that moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from chunkc.ir.errors import VALUES, BudgetError
from chunkc.ir.items import Copy, Item, ItemId, MovedId
from chunkc.ir.layout import CASTS, GRAD, Chunk, ChunkLayout
from chunkc.ir.plan import Position
from chunkc.passes.planning.offload import Saved, choose

SLACK_CHUNKS = 2
"""Chunks of room for copies under way that residents may not take: one arriving, one leaving."""


@dataclass(frozen=True)
class StepProfile:
    """Needs of a graph's step, before any budget is known.

    Attributes:
        forward, backward: positions of the phases (backward empty in inference).
        update: one position per trainable group: the smallest part of its update (empty in inference).
        boundary_nbytes: held between forward and backward: inputs, saved values, outputs with room for a loss.
    """

    forward: tuple[Position, ...]
    backward: tuple[Position, ...]
    update: tuple[Position, ...]
    boundary_nbytes: int

    @cached_property
    def passes(self) -> tuple[Position, ...]:
        return self.forward + self.backward

    @cached_property
    def all(self) -> tuple[Position, ...]:
        return self.passes + self.update

    def with_offloaded(self, saved: Sequence[Saved]) -> StepProfile:
        """Offload saved storages between the phases: equal to a new `profile`, without another liveness analysis."""
        away, left = [0] * (len(self.forward) + 1), [0] * (len(self.forward) + 1)
        back = [0] * (len(self.backward) + 1)
        for storage in saved:
            left[storage.last] += storage.nbytes
            away[storage.last + 1] += storage.nbytes
            back[storage.first] += storage.nbytes
        forward = zip(self.forward, accumulate(away), accumulate(left))
        gone = list(accumulate(reversed(back)))[::-1]  # of each call, the bytes that come back at it or later
        return StepProfile(
            tuple(call.with_less(nbytes, left_nbytes) for call, nbytes, left_nbytes in forward),
            tuple(call.with_less(nbytes, nbytes) for call, nbytes in zip(self.backward, gone[1:])),
            self.update,
            self.boundary_nbytes - sum(storage.nbytes for storage in saved),
        )


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


def chunk_sizes(layout: ChunkLayout, positions: Sequence[Position]) -> dict[ItemId, int]:
    """Return the bytes of every chunk, or part of one, that the positions need."""
    return layout.slot_sizes(dict.fromkeys(chunk for position in positions for chunk in position.items))


def _tightest(positions: Sequence[Position]) -> list[Position]:
    """Keep, of positions that need the same chunks, the one with the most other bytes: if it fits, all of them do."""
    tightest: dict[tuple[frozenset[ItemId], tuple[tuple[int, int], ...]], Position] = {}
    for position in positions:
        key = position.items, position.waiting
        if position.non_model_nbytes > tightest.setdefault(key, position).non_model_nbytes:
            tightest[key] = position
    return list(tightest.values())


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


def needed_nbytes(positions: Sequence[Position], layout: ChunkLayout, resident: frozenset[int] = frozenset()) -> int:
    """Return the bytes that the positions need on top of permanent ones, if all chunks but residents' move."""
    sizes = chunk_sizes(layout, positions)
    return max(call.non_model_nbytes + moving_nbytes(call, sizes, resident) for call in _tightest(positions))


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

    def keep(chunks: frozenset[ItemId]) -> frozenset[ItemId]:
        return frozenset(chunk for chunk in chunks if chunk.has_own_slot(resident))

    return replace(position, reads=keep(position.reads), writes=keep(position.writes))


def moving_nbytes(position: Position, sizes: Mapping[ItemId, int], resident: frozenset[int]) -> int:
    """Return the slot bytes that the position cannot do without, given these residents, and waiting gradients."""
    slots = sum([sizes[chunk] for chunk in position.items if chunk.has_own_slot(resident)])
    return slots + position.waiting_nbytes(resident)


def choose_resident(
    positions: Sequence[Position],
    layout: ChunkLayout,
    budget_nbytes: int,
    allowed: frozenset[int],
    external_nbytes: int = 0,
) -> frozenset[int]:
    """Choose the resident groups: all if they fit, else as many as leave room to move, in `evenly_spread` order."""
    sizes = chunk_sizes(layout, positions)
    needs = _tightest(positions)

    def fits(resident: frozenset[int], fixed: int) -> bool:
        return all(
            fixed + position.non_model_nbytes + moving_nbytes(position, sizes, resident) <= budget_nbytes
            for position in needs
        )

    whole = everything(layout)
    if allowed == whole and fits(whole, fixed_nbytes(layout, whole) + external_nbytes):
        return whole
    slack = SLACK_CHUNKS * max(sizes.values(), default=0)
    resident, fixed = frozenset[int](), fixed_nbytes(layout, frozenset()) + external_nbytes + slack
    for index in evenly_spread(allowed):
        wider, with_it = resident | {index}, fixed + group_nbytes(layout, index)
        if fits(wider, with_it):
            resident, fixed = wider, with_it
    return resident


def evenly_spread(groups: Iterable[int]) -> list[int]:
    """Order groups so that every prefix is spread over all of them, the first used group first.

    Moving groups are then spread over the step as well: a link that is idle while residents are used cannot make up for
    it later. Van der Corput's sequence: by the binary digits of their places, backwards.
    """
    placed = sorted(groups)
    width = len(placed).bit_length()
    places = sorted(range(len(placed)), key=lambda place: f"{place:0{width}b}"[::-1])
    return [placed[place] for place in places]


def choose_replicated(
    positions: Sequence[Position],
    layout: ChunkLayout,
    budget_nbytes: int,
    allowed: frozenset[int],
    external_nbytes: int = 0,
) -> ChunkLayout:
    """Choose the sharded groups to replicate: all if they fit, else as many as leave room to move.

    The order is `choose_resident`'s. The layout's own choice is ignored. All inputs are equal on all ranks, so all
    ranks choose alike.
    """
    none, every = layout.with_replicated(()), layout.with_replicated(allowed)
    needs, fixed = _tightest(positions), fixed_nbytes(none, frozenset()) + external_nbytes
    moving, replicated = chunk_sizes(none, needs), chunk_sizes(every, needs)

    def fits(whole: frozenset[int], fixed_nbytes: int) -> bool:
        return all(
            fixed_nbytes
            + position.non_model_nbytes
            + sum((replicated if chunk.group in whole else moving)[chunk] for chunk in position.items)
            <= budget_nbytes
            for position in needs
        )

    if fits(allowed, fixed + replicated_nbytes(every) - replicated_nbytes(none)):
        return every
    whole, fixed = frozenset[int](), fixed + SLACK_CHUNKS * max(moving.values(), default=0)
    for index in evenly_spread(allowed):
        wider, with_it = whole | {index}, fixed + every.groups[index].replicated_nbytes
        if fits(wider, with_it):
            whole, fixed = wider, with_it
    return layout.with_replicated(whole)


def remaining_replicated(
    positions: Sequence[Position], layout: ChunkLayout, budget_nbytes: int, external_nbytes: int
) -> ChunkLayout:
    """Keep as many replicated groups as fit with these external bytes: all of them if there is room."""
    if not layout.replicated_by_choice:
        return layout
    try:
        check_minimum(positions, layout, budget_nbytes, external_nbytes)
    except BudgetError:
        return choose_replicated(positions, layout, budget_nbytes, layout.replicated_by_choice, external_nbytes)
    return layout


def choose_offloaded(
    saved: Sequence[Saved],
    kept: StepProfile,
    least_nbytes: int,
    layout: ChunkLayout,
    budget_nbytes: int,
    resident: frozenset[int],
) -> frozenset[str]:
    """Choose saved storages to offload so that every call has room with these residents, and copies too if possible.

    Args:
        saved: the candidates.
        kept: the step without offloading.
        least_nbytes: its bytes for values and chunks with these residents, if all candidates are offloaded.
    """
    sizes = chunk_sizes(layout, kept.passes)
    free_nbytes = budget_nbytes - fixed_nbytes(layout, resident)
    slack = SLACK_CHUNKS * max(sizes.values(), default=0)
    free_nbytes -= slack if least_nbytes + slack <= free_nbytes else 0
    rooms = [free_nbytes - moving_nbytes(position, sizes, resident) for position in kept.passes]
    return choose(saved, kept.forward, kept.backward, rooms)


def remaining_residents(
    positions: Sequence[Position],
    layout: ChunkLayout,
    budget_nbytes: int,
    external_nbytes: int,
    resident: frozenset[int],
) -> tuple[frozenset[int], int]:
    """Keep as many residents as fit with these external bytes, and return them with the smallest budget for that.

    All of them if there is room, else as many as fit, as `choose_resident`.

    Raises:
        BudgetError: there is no room even without residents.
    """
    try:
        return resident, check_minimum(positions, layout, budget_nbytes, external_nbytes, resident)
    except BudgetError as error:
        with_residents = error
    try:
        minimum = check_minimum(positions, layout, budget_nbytes, external_nbytes)
    except BudgetError as error:
        raise min(error, with_residents, key=lambda error: error.minimum_nbytes) from None
    finally:
        del with_residents  # the error refers to this frame, which would refer to the error
    return choose_resident(positions, layout, budget_nbytes, resident, external_nbytes), minimum


def check_minimum(
    positions: Sequence[Position],
    layout: ChunkLayout,
    budget_nbytes: int,
    external_nbytes: int,
    resident: frozenset[int] = frozenset(),
    *,
    all_may_be_resident: bool = False,
) -> int:
    """Return the smallest budget that works with these residents.

    With `all_may_be_resident` it may also be one that works with all groups resident.

    Raises:
        BudgetError: `budget_nbytes` is below it.
    """
    sizes = chunk_sizes(layout, positions)
    fixed = fixed_nbytes(layout, resident)
    if not positions:
        return fixed + external_nbytes

    def total(position: Position) -> int:
        return fixed + external_nbytes + position.non_model_nbytes + moving_nbytes(position, sizes, resident)

    worst = max(_tightest(positions), key=total)
    minimum = total(worst)
    if all_may_be_resident:  # without the gaps between chunks, and optimizer tiles, a very small model may need less
        whole = everything(layout)
        minimum = min(minimum, fixed_nbytes(layout, whole) + external_nbytes + needed_nbytes(positions, layout, whole))
    if minimum > budget_nbytes:
        moving = moving_only(worst, resident)
        contents = [
            (VALUES, worst.non_model_nbytes),
            ("parameters on the compute tier, with gradients and optimizer states", fixed - layout.overhead_nbytes),
            ("workspaces of libraries, and the allocator's rounding of them", layout.overhead_nbytes),
            ("values of earlier calls that are still held", external_nbytes),
            *((f"chunk {chunk} ({layout.groups[chunk.group].title})", sizes[chunk]) for chunk in sorted(moving.items)),
        ]
        raise BudgetError(
            minimum_nbytes=minimum,
            budget_nbytes=budget_nbytes,
            moment=f"{worst.op} ({worst.name})",
            module=worst.module,
            call=worst.name,
            contents=sorted(((k, n) for k, n in contents if n), key=lambda item: -item[1]),
        )
    return minimum
