"""Where an optimizer updates chunk groups: in slots on the compute tier, or at home by the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from chunkc.ir.errors import OptionsError
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import ChunkGroup
from chunkc.passes.planning.update_placement import groups_for_cpu
from chunkc.session.session import Session

AUTO, DEVICE, CPU = "auto", "device", "cpu"
UPDATE_ON = (AUTO, DEVICE, CPU)


def groups_at_home(session: Session, groups: Sequence[int], update_on: str, num_stages: int = 1) -> frozenset[int]:
    """Those of a session's groups that the CPU updates where they are at home (see `divided`)."""
    layout = session.store.layout
    return at_home(session, [layout.groups[index] for index in groups], update_on, num_stages)


def at_home(session: Session, groups: Sequence[ChunkGroup], update_on: str, num_stages: int = 1) -> frozenset[int]:
    """Those of the groups that the CPU updates at home where they move."""
    return divided(
        groups,
        update_on,
        home=session.options.home,
        on_cuda=session.device.type != "cpu",
        hardware=session.hardware,
        num_stages=num_stages,
    )


def divided(
    groups: Sequence[ChunkGroup], update_on: str, *, home: str, on_cuda: bool, hardware: Hardware, num_stages: int = 1
) -> frozenset[int]:
    """Those of the groups that the CPU updates where they are at home.

    With "auto", a model on a CUDA device divides them by cost. On the CPU the budget stands for a device's memory, so
    "auto" updates in slots.

    Raises:
        OptionsError: `update_on` is "cpu", but some of a group's data is on a disk.
    """
    if update_on == DEVICE or (update_on == AUTO and not on_cuda):
        return frozenset()
    if home != "cpu":
        if update_on == CPU:
            raise OptionsError(
                f'update_on="cpu" updates memory where it is, and home is {home!r}; use home="cpu", or '
                'update_on="device"'
            )
        return frozenset()
    everything = frozenset(group.index for group in groups)
    return everything if update_on == CPU else groups_for_cpu(groups, hardware, num_stages)
