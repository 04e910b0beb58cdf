"""The host's memory at each stage of a model's life: what is at home in RAM, and what passes through it."""

from __future__ import annotations

from chunkc.ir.chunks import PARAM, ChunkLayout
from chunkc.ir.explanation import HostNeeds
from chunkc.passes.planning import fixed_nbytes
from chunkc.runtime.nursery import SMALLEST_NBYTES


def host_needs(
    layout: ChunkLayout,
    resident: frozenset[int],
    *,
    training_nbytes: int,
    home_nbytes: int,
    device_is_host: bool,
) -> HostNeeds:
    """The most that each stage takes. Buffers, and what the process takes without a model, come on top.

    Args:
        resident: groups that stay on the compute tier.
        training_nbytes: of a step.
        home_nbytes: at home in RAM, of all kinds.
        device_is_host: what stays on the compute tier is in the host's memory, too.
    """
    specs = layout.specs().values()
    at_home = [group for group in layout.groups if group.index not in resident]
    # A tensor on its way is in memory where it comes from and where it goes to.
    on_the_way = 2 * max((spec.home_nbytes for spec in specs), default=0)
    born = sum(spec.home_nbytes for spec in specs if not layout.is_on_disk(PARAM) or spec.home_nbytes < SMALLEST_NBYTES)
    laid_out = 0 if layout.is_on_disk(PARAM) else sum(group.nbytes(PARAM) for group in at_home)
    staying = [*layout.small, *(s.spec for index in resident for s in layout.groups[index].slices)]
    laid_out += sum(spec.nbytes for spec in staying) if device_is_host else 0
    between_steps = home_nbytes + (fixed_nbytes(layout, resident) if device_is_host else 0)
    chunks = [group.nbytes(kind) for group in at_home for kind in group.update_kinds]
    return HostNeeds(
        building=born + on_the_way,
        loading=max(born, laid_out) + on_the_way,
        training=training_nbytes,
        saving=between_steps + on_the_way,
        resuming=between_steps + 2 * max(chunks, default=0),
    )
