"""Count the host's memory during training: homes in RAM, and room for copies of saved values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import GRAD, PARAM, ChunkLayout
from chunkc.ir.units import format_nbytes
from chunkc.policy.captured_step import Captured


class HostFull(Exception):
    """Copies of saved values do not fit into the host's memory, so that the plan that needs them is ruled out.

    Args:
        copied_nbytes: of the copies.
        room_nbytes: of the host's memory, without homes.
    """

    def __init__(self, copied_nbytes: int, room_nbytes: int) -> None:
        super().__init__(
            f"A plan that copies {format_nbytes(copied_nbytes)} of saved values home would fit, but the host's memory "
            f"has only {format_nbytes(max(0, room_nbytes))} left for them."
        )


def home_nbytes(
    layout: ChunkLayout,
    resident: frozenset[int],
    consumed: Collection[int] = (),
    counts: Callable[[str], bool] = lambda kind: True,
) -> int:
    """Return the home bytes of all groups that move, for the kinds of data that count.

    Args:
        consumed: groups without gradients at home.
    """
    return sum(
        group.nbytes(kind)
        for group in layout.groups
        for kind in (group.update_kinds if group.trainable else group.update_kinds[:1])
        if group.index not in resident and counts(kind) and not (kind == GRAD and group.index in consumed)
    )


def shadow_copies_nbytes(
    layout: ChunkLayout, groups: Collection[int], counts: Callable[[str], bool] = lambda kind: True
) -> int:
    """Return the bytes of these groups' shadow copies (`chunkc.runtime.store.shadow_copies`)."""
    copied = [layout.groups[index] for index in groups]
    return sum(group.nbytes(kind) for group in copied for kind in group.update_kinds if kind != GRAD and counts(kind))


def with_room_for_copies(
    layout: ChunkLayout, groups: Iterable[int], memory_nbytes: float, disk_nbytes: float = math.inf
) -> frozenset[int]:
    """Return as many of the groups as have room for shadow copies in so many bytes, the first ones first."""
    found: list[int] = []
    for group in groups:
        memory_left = memory_nbytes - shadow_copies_nbytes(layout, [group], layout.is_in_ram)
        disk_left = disk_nbytes - shadow_copies_nbytes(layout, [group], layout.is_on_disk)
        if min(memory_left, disk_left) >= 0:
            memory_nbytes, disk_nbytes = memory_left, disk_left
            found.append(group)
    return frozenset(found)


def check_copies(
    form: Captured,
    layout: ChunkLayout,
    resident: frozenset[int],
    hardware: Hardware,
    budget_nbytes: int,
    *,
    consumed: Collection[int] = (),
    shadow_copied: frozenset[int] = frozenset(),
) -> None:
    """Check that the host's memory, if its size is stated, has room for a graph's offloaded values.

    Homes in RAM count, and on a CPU the budget. Other graphs' copies and other programs do not. A model that the host
    has no room for, even with all of the budget for residents and without copies, is planned for a host that has room.

    Args:
        consumed: groups without gradients at home.
        shadow_copied: groups with shadow copies, unless they are resident.

    Raises:
        HostFull: it has not.
    """
    if not form.offloaded or hardware.host_memory_nbytes is None or layout.is_on_disk(PARAM):
        return
    copied_nbytes = sum(saved.nbytes for saved in form.offloaded)
    in_ram_nbytes = home_nbytes(layout, resident, consumed, layout.is_in_ram)
    in_ram_nbytes += shadow_copies_nbytes(layout, shadow_copied - resident, layout.is_in_ram)
    without_residents_nbytes = home_nbytes(layout, frozenset(), consumed, layout.is_in_ram)
    if hardware.kind != "cpu" and without_residents_nbytes - budget_nbytes > hardware.host_memory_nbytes:
        return  # residents save home at most the budget, so no plan fits the host
    own_nbytes = budget_nbytes if hardware.kind == "cpu" else 0
    room_nbytes = hardware.host_memory_nbytes - in_ram_nbytes - own_nbytes
    if copied_nbytes > room_nbytes:
        raise HostFull(copied_nbytes, room_nbytes)
