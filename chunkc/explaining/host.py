"""Count the host's memory at each stage of a model's life: homes in RAM, and tensors that pass through it."""

from __future__ import annotations

from chunkc.ir.explanation import HostNeeds
from chunkc.ir.layout import PARAM, ChunkLayout
from chunkc.passes.planning.room import fixed_nbytes
from chunkc.runtime.storage.unassigned import SMALLEST_NBYTES


def host_needs(
    layout: ChunkLayout,
    resident: frozenset[int],
    *,
    peak_nbytes: int | None,
    home_nbytes: int,
    num_ranks: int = 1,
) -> HostNeeds:
    """Return the most bytes that each stage takes. Buffers, and bytes of processes without a model, come on top.

    Args:
        resident: resident groups.
        peak_nbytes: on the compute tier, if that is in the host's memory; None: it is not.
        home_nbytes: of homes in RAM, for all kinds of data.
        num_ranks: processes on the host, each with shards as large as the layout's. While they are distributed, and
            when files are read or written, each has whole tensors in memory.
    """
    specs = layout.specs().values()
    moving = [group for group in layout.groups if group.index not in resident]
    # A tensor that is copied is in memory twice: at its source and at its destination.
    on_the_way = 2 * max((spec.whole_nbytes for spec in specs), default=0)
    unassigned = sum(
        spec.home_nbytes for spec in specs if not layout.is_on_disk(PARAM) or spec.home_nbytes < SMALLEST_NBYTES
    )
    whole = sum(spec.whole_nbytes for spec in specs if spec.shards is not None)
    laid_out = 0 if layout.is_on_disk(PARAM) else sum(group.nbytes(PARAM) for group in moving)
    fixed = [*layout.small, *(s.spec for index in resident for s in layout.groups[index].slices)]
    laid_out += 0 if peak_nbytes is None else sum(spec.nbytes for spec in fixed)
    between_steps = home_nbytes + (0 if peak_nbytes is None else fixed_nbytes(layout, resident))
    chunks = [group.nbytes(kind) for group in moving for kind in group.update_kinds]
    return HostNeeds(
        building=num_ranks * (unassigned + whole + (0 if whole else on_the_way)),
        loading=num_ranks * (max(unassigned, laid_out) + on_the_way),
        training=num_ranks * (home_nbytes + (peak_nbytes or 0)),
        saving=num_ranks * (between_steps + on_the_way),
        resuming=num_ranks * (between_steps + 2 * max(chunks, default=0)),
    )
