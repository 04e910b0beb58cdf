"""What stays resident, what goes home for others, and what the minimum is; `phases` plans what moves."""

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
"""Room for copies on the way that a resident group may not take: one chunk arriving, one leaving."""


@dataclass(frozen=True)
class StepProfile:
    """What a graph needs, before any budget is known.

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
        """The same step, where these are at home between the phases: what `profile` makes of it, without asking again
        what is alive at each call."""
        away, left = [0] * (len(self.forward) + 1), [0] * (len(self.forward) + 1)
        back = [0] * (len(self.backward) + 1)
        for one in saved:
            left[one.last] += one.nbytes
            away[one.last + 1] += one.nbytes
            back[one.first] += one.nbytes
        forward = zip(self.forward, accumulate(away), accumulate(left))
        gone = list(accumulate(reversed(back)))[::-1]  # of each call, what comes back at it or later
        return StepProfile(
            tuple(one.with_less(nbytes, left_nbytes) for one, nbytes, left_nbytes in forward),
            tuple(one.with_less(nbytes, nbytes) for one, nbytes in zip(self.backward, gone[1:])),
            self.update,
            self.boundary_nbytes - sum(one.nbytes for one in saved),
        )


def chunk_items(layout: ChunkLayout, positions: Sequence[Position], resident: frozenset[int]) -> dict[MovedId, Item]:
    """Every chunk, or part of one, that the positions need."""
    alike: dict[tuple[str, int, int], Item] = {}
    found: dict[MovedId, Item] = {}
    for chunk in dict.fromkeys(chunk for position in positions for chunk in position.items):
        key = chunk.kind, chunk.group, -1 if chunk.part is None else chunk.part[1] - chunk.part[0]
        if key not in alike:
            alike[key] = _chunk_item(layout, chunk, resident)
        found[chunk] = alike[key]
    return found


def _chunk_item(layout: ChunkLayout, chunk: Chunk, resident: frozenset[int]) -> Item:
    nbytes, (back, home) = layout.chunk_nbytes_of(chunk), layout.links_of_chunk(chunk)
    group = layout.groups[chunk.group]
    if group.is_gathered(chunk):  # a gradient's slot begins empty: each rank's part stays at home, and is added to
        whole_nbytes = group.gathered_numel * group.dtype.itemsize
        gathered_nbytes = 0 if chunk.kind == GRAD else whole_nbytes
        return Item(nbytes, Copy(back, gathered_nbytes), Copy(home, whole_nbytes))
    if chunk.kind in CASTS:
        return Item(nbytes, Copy(back, layout.read_for_cast_nbytes(chunk, resident)), Copy(home, 0))
    return Item(nbytes, Copy(back), Copy(home))


def chunk_sizes(layout: ChunkLayout, positions: Sequence[Position]) -> dict[ItemId, int]:
    """Bytes of every chunk, or part of one, that the positions need."""
    known: dict[ItemId, int] = layout.__dict__.setdefault("_chunk_sizes", {})  # asked for way by way
    chunks = dict.fromkeys(chunk for position in positions for chunk in position.items)
    known.update({chunk: layout.chunk_nbytes_of(chunk) for chunk in chunks if chunk not in known})
    return {chunk: known[chunk] for chunk in chunks}


def _tightest(positions: Sequence[Position]) -> list[Position]:
    """Of positions that need the same chunks the one with the most bytes beside them: where it fits, all of them do."""
    found: dict[tuple[frozenset[ItemId], tuple[tuple[int, int], ...]], Position] = {}
    for position in positions:
        key = position.items, position.waiting
        known = found.setdefault(key, position)
        if position.non_model_nbytes > known.non_model_nbytes:
            found[key] = position
    return list(found.values())


def fixed_nbytes(layout: ChunkLayout, resident: frozenset[int]) -> int:
    """What is on the compute tier for good, once every gradient and state exists: model data and overhead."""
    residents = (group_nbytes(layout, index) for index in resident)
    return layout.overhead_nbytes + layout.small_nbytes + replicated_nbytes(layout) + sum(residents)


def group_nbytes(layout: ChunkLayout, index: int) -> int:
    """What a group takes on the compute tier for good where it stays there."""
    group = layout.groups[index]
    transient_nbytes = sum(s.spec.gradient_nbytes for s in group.slices) if index in layout.transient else 0
    return group.resident_nbytes - transient_nbytes


def replicated_nbytes(layout: ChunkLayout) -> int:
    """What every rank has whole, of groups that are cut over ranks."""
    return sum(group.replicated_nbytes for group in layout.groups)


def everything(layout: ChunkLayout) -> frozenset[int]:
    """Every group."""
    return frozenset(group.index for group in layout.groups)


def needed_nbytes(positions: Sequence[Position], layout: ChunkLayout, resident: frozenset[int] = frozenset()) -> int:
    """What the positions need beside what is on the compute tier for good, where all chunks but residents' move."""
    sizes = chunk_sizes(layout, positions)
    return max(one.non_model_nbytes + moving_nbytes(one, sizes, resident) for one in _tightest(positions))


@dataclass(frozen=True)
class ResidentData:
    """Model data that never leaves the compute tier, by what it is; gradients by parameter.

    What every rank has whole counts with the parameters.
    """

    parameter_nbytes: int
    state_nbytes: int
    gradients: Mapping[str, int]

    @staticmethod
    def of(layout: ChunkLayout, resident: frozenset[int]) -> ResidentData:
        staying = [*layout.small, *(s.spec for index in sorted(resident) for s in layout.groups[index].slices)]
        counters = layout.small_nbytes - sum(spec.nbytes + spec.training_nbytes for spec in layout.small)
        return ResidentData(
            sum(spec.nbytes for spec in staying) + replicated_nbytes(layout),
            sum(spec.optimizer_nbytes for spec in staying) + counters,
            {spec.name: spec.gradient_nbytes for spec in staying if spec.trainable},
        )


def moving_only(position: Position, resident: frozenset[int]) -> Position:
    """The position without the chunks that stay with resident groups."""
    if all(chunk.has_own_slot(resident) for chunk in position.items):
        return position

    def keep(chunks: frozenset[ItemId]) -> frozenset[ItemId]:
        return frozenset(chunk for chunk in chunks if chunk.has_own_slot(resident))

    return replace(position, reads=keep(position.reads), writes=keep(position.writes))


def moving_nbytes(position: Position, sizes: Mapping[ItemId, int], resident: frozenset[int]) -> int:
    """Slots that the position cannot do without beside these residents, and gradients of those that wait."""
    slots = sum([sizes[chunk] for chunk in position.items if chunk.has_own_slot(resident)])
    return slots + position.waiting_nbytes(resident)


def choose_resident(
    positions: Sequence[Position],
    layout: ChunkLayout,
    budget_nbytes: int,
    allowed: frozenset[int],
    external_nbytes: int = 0,
) -> frozenset[int]:
    """The groups that stay on the compute tier: all if they fit, else as many that leave room to move, in the order of
    `evenly_spread`."""
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
    """Groups in an order of which each beginning is spread over all of them, the first used one first.

    What moves is then spread over the step as well: a link that has nothing to do while residents are used does not
    make up for it later. Van der Corput's sequence: by the binary digits of their places, backwards.
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
    """Of groups that are cut over ranks, whose parameters stand whole on every rank: all if they fit, else as many
    that leave room to move, as in `choose_resident`. Whatever the layout says of that does not count.

    All that it goes by is the same on all ranks, so they choose alike.
    """
    none, every = layout.with_replicated(()), layout.with_replicated(allowed)
    needs, fixed = _tightest(positions), fixed_nbytes(none, frozenset()) + external_nbytes
    moving, replicated = chunk_sizes(none, needs), chunk_sizes(every, needs)

    def fits(whole: frozenset[int], fixed_nbytes: int) -> bool:
        return all(
            fixed_nbytes
            + one.non_model_nbytes
            + sum((replicated if chunk.group in whole else moving)[chunk] for chunk in one.items)
            <= budget_nbytes
            for one in needs
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
    """The layout where those groups are whole on every rank that may stay so where more room is needed than was known
    of: all of them if they leave the room, else as many as do."""
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
    """Saved storages that go home so that every call has room beside these residents, and copies too if possible.

    Args:
        saved: those that may leave.
        kept: the step where none leaves.
        least_nbytes: what it needs for values and chunks beside these residents, where all leave.
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
    """Those residents that may stay where more room is needed than was known of, and the smallest budget for that.

    All of them if they leave the room, else as many as do, as in `choose_resident`.

    Raises:
        BudgetError: there is no room even where none stays.
    """
    try:
        return resident, check_minimum(positions, layout, budget_nbytes, external_nbytes, resident)
    except BudgetError as error:
        beside_all = error
    try:
        minimum = check_minimum(positions, layout, budget_nbytes, external_nbytes)
    except BudgetError as error:
        raise min(error, beside_all, key=lambda one: one.minimum_nbytes) from None
    finally:
        del beside_all  # an error keeps this frame, and would keep itself
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
    """The smallest budget that works with these residents; with `all_may_be_resident`, or with everything resident.

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
    if all_may_be_resident:  # without the gaps that chunks have, and optimizer tiles, a very small model may need less
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
            contents=sorted(((k, n) for k, n in contents if n), key=lambda item: -item[1]),
        )
    return minimum
