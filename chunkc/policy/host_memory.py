"""The host's memory while a model is trained: what is at home in it, and the room for copies of saved values."""

from __future__ import annotations

from collections.abc import Callable, Collection

from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import GRAD, PARAM, ChunkLayout
from chunkc.ir.units import format_nbytes
from chunkc.policy.captured_step import Captured


class HostFull(Exception):
    """Copies of saved values have no room in the host's memory: what would need them is no choice.

    Attributes:
        copied_nbytes: of the copies.
        room_nbytes: what home leaves for them.
    """

    def __init__(self, copied_nbytes: int, room_nbytes: int) -> None:
        self.copied_nbytes, self.room_nbytes = copied_nbytes, room_nbytes
        super().__init__(
            f"A plan that copies {format_nbytes(copied_nbytes)} of saved values home would fit, but the host's memory "
            f"has {format_nbytes(max(0, room_nbytes))} for them beside what else it holds."
        )


def home_nbytes(
    layout: ChunkLayout,
    resident: frozenset[int],
    consumed: Collection[int] = (),
    counts: Callable[[str], bool] = lambda kind: True,
) -> int:
    """Bytes at home of every group that moves, of those kinds of data that count.

    Args:
        consumed: groups whose gradients are never there.
    """
    return sum(
        group.nbytes(kind)
        for group in layout.groups
        for kind in (group.update_kinds if group.trainable else group.update_kinds[:1])
        if group.index not in resident and counts(kind) and not (kind == GRAD and group.index in consumed)
    )


def shadow_copies_nbytes(
    layout: ChunkLayout, resident: frozenset[int], counts: Callable[[str], bool] = lambda kind: True
) -> int:
    """Bytes of the twins (see `chunkc.runtime.store.shadow_copies`) of every group that moves and is trained."""
    trained = resident.union(group.index for group in layout.groups if not group.trainable)
    return home_nbytes(layout, trained, counts=lambda kind: kind != GRAD and counts(kind))


def check_copies(
    seen: Captured,
    layout: ChunkLayout,
    resident: frozenset[int],
    hardware: Hardware,
    budget_nbytes: int,
    *,
    consumed: Collection[int] = (),
    with_shadow_copies: bool = False,
) -> None:
    """Whether the host's memory, if it is known, has room for copies of what a graph has at home between its phases.

    What is at home in RAM counts, and on a CPU the budget. Other graphs' copies and other programs do not.

    Args:
        consumed: groups whose gradients never go home.
        with_shadow_copies: groups that move have them.

    Raises:
        HostFull: they do not.
    """
    if not seen.offloaded or hardware.host_memory_nbytes is None or layout.is_on_disk(PARAM):
        return
    copied_nbytes = sum(one.nbytes for one in seen.offloaded)
    in_ram_nbytes = home_nbytes(layout, resident, consumed, lambda kind: not layout.is_on_disk(kind))
    if with_shadow_copies:
        in_ram_nbytes += shadow_copies_nbytes(layout, resident, lambda kind: not layout.is_on_disk(kind))
    own_nbytes = budget_nbytes if hardware.kind == "cpu" else 0
    room_nbytes = hardware.host_memory_nbytes - in_ram_nbytes - own_nbytes
    if copied_nbytes > room_nbytes:
        raise HostFull(copied_nbytes, room_nbytes)
