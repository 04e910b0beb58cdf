"""Choose where chunk groups are updated: in slots on the device, or at home, by the CPU.

An update on the device moves parameter, gradient and states over the link and all but the gradient back. An update on
the CPU moves nothing over the link: gradients are at home already, and the next forward fetches the updated parameter
from there (ZeRO-Offload, arXiv:2101.06840; here chunk by chunk, both at once). Both work at the same time, so the best
split is the one that ends its slower part first.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import ChunkGroup
from chunkc.ir.links import TO_DEVICE, TO_HOME
from chunkc.ir.states import INT8, StateFormat
from chunkc.ir.updates import update_stages, update_traffic


def can_update_resident(states: StateFormat, num_stages: int) -> bool:
    """Whether a backward can update a resident group: an update in one stage that takes no memory for itself."""
    return num_stages == 1 and states.moments != INT8


def group_update_nbytes(group: ChunkGroup, num_stages: int = 1) -> int:
    """Return the bytes that the update of a whole group reads and writes where it runs."""
    return sum(stage.nbytes for stage in update_traffic(group.dtype, group.states, group.numel, num_stages))


def device_update_s(groups: Sequence[ChunkGroup], hardware: Hardware, num_stages: int = 1) -> float:
    """Return the seconds of an update of the groups on the device: of the link, both ways at once, or of its memory."""
    stages = [(group, stage) for group in groups for stage in update_stages(group.update_kinds, num_stages)]
    inwards = sum(group.nbytes(kind) for group, stage in stages for kind in stage.kinds)
    outwards = sum(group.nbytes(kind) for group, stage in stages for kind in stage.writes)
    memory_s = sum(group_update_nbytes(group, num_stages) for group in groups) / hardware.memory_bytes_per_s
    return max(hardware.link_seconds({TO_DEVICE: inwards, TO_HOME: outwards}), memory_s)


def cpu_update_s(groups: Sequence[ChunkGroup], hardware: Hardware, num_stages: int = 1) -> float | None:
    """Return the seconds that the CPU takes to update the groups in place; None if its rate is not stated."""
    if hardware.cpu_update_bytes_per_s is None:
        return None
    nbytes = sum(group_update_nbytes(group, num_stages) for group in groups)
    return nbytes / (hardware.cpu_update_bytes_per_s / hardware.devices_per_host)


def groups_for_cpu(groups: Sequence[ChunkGroup], hardware: Hardware, num_stages: int = 1) -> frozenset[int]:
    """Choose the groups that the CPU updates while the device updates the rest, such that both end the soonest.

    The last ones go to the CPU: the next forward needs the first ones soonest, and finds them updated first.
    """
    best, best_s = frozenset[int](), device_update_s(groups, hardware, num_stages)
    for count in range(1, len(groups) + 1):
        by_cpu = groups[len(groups) - count :]
        seconds = cpu_update_s(by_cpu, hardware, num_stages)
        if seconds is None:
            return best
        both_s = max(seconds, device_update_s(groups[: len(groups) - count], hardware, num_stages))
        if both_s < best_s:
            best, best_s = frozenset(group.index for group in by_cpu), both_s
    return best
