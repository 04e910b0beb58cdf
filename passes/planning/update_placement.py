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
from chunkc.passes.planning.update_seconds import cpu_update_s, update_seconds


def groups_for_cpu(groups: Sequence[ChunkGroup], hardware: Hardware, num_stages: int = 1) -> frozenset[int]:
    """Choose the groups that the CPU updates while the device updates the rest, such that both end the soonest.

    The last ones go to the CPU: the next forward needs the first ones soonest, and finds them updated first.
    """
    best, best_s = frozenset[int](), update_seconds(groups, hardware, num_stages)
    for count in range(1, len(groups) + 1):
        by_cpu = groups[len(groups) - count :]
        seconds = cpu_update_s(by_cpu, hardware, num_stages)
        if seconds is None:
            return best
        both_s = max(seconds, update_seconds(groups[: len(groups) - count], hardware, num_stages))
        if both_s < best_s:
            best, best_s = frozenset(group.index for group in by_cpu), both_s
    return best
