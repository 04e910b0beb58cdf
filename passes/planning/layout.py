"""Lay parameters out in fixed-size chunks, in order of use (PatrickStar's chunk mapping, made block by block).

A chunk boundary inside a repeated block would fall at a different place in every block, and with it the cuts between
segments: then no two blocks would compile to the same code. So a block (`h.3`, `encoder.layer.11`) that fits a chunk is
never torn, and a larger one is torn at the same places everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median_high

from chunkc.ir.errors import OptionsError
from chunkc.ir.layout import ChunkGroup, ChunkLayout, ParamSpec, TensorSlice
from chunkc.ir.states import StateFormat

SMALL_FRACTION = 64
"""Divisor of a chunk's size below which a parameter (norms, biases) is small: always on the compute tier."""


EMPTY_LAYOUT = ChunkLayout(0, (), ())


def block_of(name: str) -> tuple[str, bool]:
    """Return the repeated block of a parameter, and whether it is one: the name up to the first numeric component."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1]), True
    return ".".join(parts[:-1]) or name, False


def blocks_in_order(specs: Iterable[ParamSpec]) -> list[list[ParamSpec]]:
    blocks: dict[str, list[ParamSpec]] = {}
    for spec in specs:
        blocks.setdefault(block_of(spec.name)[0], []).append(spec)
    return list(blocks.values())


NEVER_TORN_NBYTES = 1 << 20
"""Largest block that is always one chunk: to copy less at once saves nothing."""


WIDELY = 2
"""Blocks differ widely if the largest has more than this multiple of the median size."""


def auto_chunk_nbytes(specs: Sequence[ParamSpec]) -> int:
    """Choose the chunk size: that of a repeated block, or without repetition a sixteenth of the model.

    It is no less than the largest tensor of a model without repetition. If blocks differ, it is the median block, and
    larger blocks are torn: each of a few huge chunks would have to be resident as a whole, or to move as a whole
    through what little room is left. If blocks differ widely, as those of a U-Net do, no two are planned alike anyway,
    and chunks are a quarter of the median.
    """
    total = sum(spec.whole_nbytes for spec in specs)
    repeated = [block for block in blocks_in_order(specs) if block_of(block[0].name)[1]]
    if repeated:
        rooms = [_room(block) for block in repeated]
        middle, num_most = median_high(rooms), 64
        if max(rooms) > WIDELY * middle:
            middle, num_most = middle // 4, 4 * num_most
        wanted = max(min(max(rooms), max(middle, NEVER_TORN_NBYTES)), total // num_most)
    else:
        wanted = max(max((spec.whole_nbytes for spec in specs), default=0), total // 16)
    return max(4096, -(-wanted // 4096) * 4096)


def lay_out(
    specs: Sequence[ParamSpec], chunk_nbytes: int | None = None, *, extending: ChunkLayout | None = None
) -> ChunkLayout:
    """Lay parameters, given in order of use, out in chunks of `chunk_nbytes` (None: chosen from the model alone).

    A tensor larger than a chunk gets a chunk of its own size. Frozen and trainable parameters, dtypes, and formats of
    states never share a chunk. A sharded parameter counts with its whole size, and is never small. With `extending`,
    its groups are kept as they are and the new ones come after them.
    """
    if chunk_nbytes is None:
        chunk_nbytes = extending.chunk_nbytes if extending else auto_chunk_nbytes(specs)
    is_small = [spec.shards is None and spec.home_nbytes * SMALL_FRACTION <= chunk_nbytes for spec in specs]
    small = [spec for spec, is_fixed in zip(specs, is_small) if is_fixed]
    large = [spec for spec, is_fixed in zip(specs, is_small) if not is_fixed]
    bins: list[list[ParamSpec]] = []
    open_bin: dict[tuple, int] = {}  # (dtype, trainable, states, not sharded) -> index of a bin with room
    for block in blocks_in_order(large):
        by_class: dict[tuple, list[ParamSpec]] = {}
        for spec in block:
            by_class.setdefault((spec.dtype, spec.trainable, spec.states, spec.shards is None), []).append(spec)
        for key, members in by_class.items():
            whole = _room(members) <= chunk_nbytes
            if key in open_bin and whole and _room([*bins[open_bin[key]], *members]) <= chunk_nbytes:
                bins[open_bin[key]].extend(members)
                continue
            bins.append([])
            open_bin[key] = len(bins) - 1
            for spec in members:
                if bins[-1] and _room([*bins[-1], spec]) > chunk_nbytes:
                    bins.append([])
                bins[-1].append(spec)
            if whole:
                open_bin[key] = len(bins) - 1
            else:
                del open_bin[key]
    first = extending.groups if extending else ()
    groups = [_group(len(first) + index, members) for index, members in enumerate(bins)]
    first_small = extending.small if extending else ()
    return ChunkLayout(chunk_nbytes, (*first, *groups), (*first_small, *small))


def extended(
    layout: ChunkLayout, specs: Iterable[ParamSpec], fixed: Iterable[ParamSpec], chunk_nbytes: int | None
) -> ChunkLayout:
    """Extend the layout by its missing parameters, given in order of use.

    `fixed` cannot live in chunks; they count among the small ones. `chunk_nbytes` is for the first layout.
    """
    laid_out = set(layout.group_of()) | {spec.name for spec in layout.small}
    new = [spec for spec in specs if spec.name not in laid_out]
    wider = lay_out(new, chunk_nbytes, extending=layout if layout.chunk_nbytes else None) if new else layout
    new_small = tuple(spec for spec in fixed if spec.name not in laid_out)
    version = layout.version + 1 if new or new_small else layout.version
    kept = {"overhead_nbytes": layout.overhead_nbytes, "disk_holds": layout.disk_holds, "version": version}
    return replace(wider, small=(*wider.small, *new_small), **kept)  # type: ignore[arg-type]


def restated(layout: ChunkLayout, states: Mapping[str, StateFormat]) -> ChunkLayout:
    """Return the layout with other formats of states, by parameter; a parameter without one takes its chunk's.

    Raises:
        OptionsError: parameters of one chunk have different formats, or lie where their format allows no state.
    """

    def named(specs: Iterable[ParamSpec]) -> dict[str, StateFormat]:
        return {spec.name: states[spec.name] for spec in specs if spec.name in states}

    groups = []
    for group in layout.groups:
        given = named(s.spec for s in group.slices)
        formats = set(given.values())
        if len(formats) > 1:
            first, second = next((a, b) for a, b in pairwise(given) if given[a] != given[b])
            raise OptionsError(
                f"{first} and {second} share a chunk, but their optimizers keep states in different formats "
                f"({given[first]}; {given[second]}): {_ADVICE}"
            )
        wanted = next(iter(formats), group.states)
        if group.states == wanted:
            groups.append(group)
            continue
        for s in group.slices:
            if s.offset % wanted.alignment:
                raise OptionsError(
                    f"{s.spec.name} begins at element {s.offset} of its chunk, and {wanted} need a multiple of "
                    f"{wanted.alignment}: {_ADVICE}"
                )
        slices = tuple(replace(s, spec=replace(s.spec, states=wanted)) for s in group.slices)
        groups.append(replace(group, slices=slices, states=wanted))
    small = tuple(replace(spec, states=states.get(spec.name, spec.states)) for spec in layout.small)
    return _changed(layout, groups, small)


def unfrozen(layout: ChunkLayout, names: Collection[str]) -> ChunkLayout:
    """Return the layout with these parameters trained, which may have been frozen when it was made.

    A chunk group with one of them has gradients and states, also for those of its parameters that stay frozen.
    """

    def trained(spec: ParamSpec) -> ParamSpec:
        return replace(spec, trainable=True) if spec.name in names else spec

    groups = []
    for group in layout.groups:
        slices = tuple(replace(s, spec=trained(s.spec)) for s in group.slices)
        trainable = group.trainable or any(s.spec.trainable for s in slices)
        groups.append(replace(group, slices=slices, trainable=trainable))
    return _changed(layout, groups, tuple(map(trained, layout.small)))


def _changed(layout: ChunkLayout, groups: Sequence[ChunkGroup], small: tuple[ParamSpec, ...]) -> ChunkLayout:
    """Return the layout with these groups and small parameters: unchanged, or its next version."""
    changed = replace(layout, groups=tuple(groups), small=small)
    return layout if changed == layout else replace(changed, version=layout.version + 1)


_ADVICE = (
    "make the optimizers before chunkc.place and before the model is first called, and chunks are laid out for them"
)


def _room(specs: Iterable[ParamSpec]) -> int:
    return sum(spec.aligned(spec.whole_numel) * spec.dtype.itemsize for spec in specs)


def _group(index: int, specs: Sequence[ParamSpec]) -> ChunkGroup:
    slices, offset, slot_offset, exchange_numel = [], 0, 0, 0
    for spec in specs:
        slices.append(TensorSlice(spec, offset, slot_offset if spec.shards is not None else 0))
        offset += spec.aligned(spec.numel)
        if spec.shards is not None:
            slot_offset += spec.aligned(spec.shards.numel)
            exchange_numel += spec.shards.exchange_numel
    first = specs[0]
    return ChunkGroup(
        index, first.dtype, first.trainable, offset, tuple(slices), first.states, slot_offset, exchange_numel
    )
