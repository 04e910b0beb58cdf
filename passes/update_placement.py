"""Where chunk groups are updated: in slots on the device, or where they are at home, by the CPU.

An update on the device moves parameter, gradient and states over the link and all but the gradient back. An update on
the CPU moves nothing over the link: gradients are at home already, and the updated parameter is where the next forward
fetches it from (ZeRO-Offload, arXiv:2101.06840; here chunk by chunk, both at once). Both work at the same time, so the
best split is the one whose slower part is done first.
"""

from __future__ import annotations

from collections.abc import Sequence

from chunkc.ir.chunks import GRAD, PARAM, ChunkGroup
from chunkc.ir.hardware import Hardware
from chunkc.ir.states import MASTER


def device_update_s(groups: Sequence[ChunkGroup], hardware: Hardware) -> float:
    """Seconds that the link takes to move the groups for an update on the device, both directions at once."""
    inwards = sum(group.nbytes(kind) for group in groups for kind in group.update_kinds)
    outwards = sum(group.nbytes(kind) for group in groups for kind in group.update_kinds if kind != GRAD)
    memory_s = (inwards + outwards) / hardware.memory_bytes_per_s
    return max(hardware.link_seconds(inwards, outwards), memory_s)


def cpu_update_s(groups: Sequence[ChunkGroup], hardware: Hardware) -> float | None:
    """Seconds that the CPU takes to update the groups in place; None where its rate is not stated.

    All kinds are read, and all but gradients written. A parameter that has a master is only written.
    """
    if hardware.cpu_update_bytes_per_s is None:
        return None
    traffic = 0
    for group in groups:
        kinds = group.update_kinds
        reads = sum(group.nbytes(kind) for kind in kinds if kind != PARAM or MASTER not in kinds)
        traffic += reads + sum(group.nbytes(kind) for kind in kinds if kind != GRAD)
    return traffic / (hardware.cpu_update_bytes_per_s / max(1, hardware.num_devices))


def groups_for_cpu(groups: Sequence[ChunkGroup], hardware: Hardware) -> frozenset[int]:
    """Indices of the groups that the CPU updates while the device updates the others, such that both end the soonest.

    The last ones go to the CPU: the next forward needs the first ones soonest, and finds them updated first.
    """
    best, best_s = frozenset[int](), device_update_s(groups, hardware)
    for count in range(1, len(groups) + 1):
        at_home = groups[len(groups) - count :]
        seconds = cpu_update_s(at_home, hardware)
        if seconds is None:
            return best
        both_s = max(seconds, device_update_s(groups[: len(groups) - count], hardware))
        if both_s < best_s:
            best, best_s = frozenset(group.index for group in at_home), both_s
    return best
