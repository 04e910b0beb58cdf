"""Keep replicated chunks that persist across steps: parameters in stages 1 and 2 of ZeRO, gradients in stage 1.

Buffers are allocated at the first use and not freed between steps, so every plan counts them. This rank's shard at home
is authoritative: before a phase, it is compared with the replica, bit by bit. So any change of it is detected, by an
optimizer or by user code, on one rank or on all, and the chunk is gathered anew on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import torch

from chunkc.ir.layout import GRAD, PARAM, Chunk, ChunkGroup
from chunkc.runtime.device.tier import Tier
from chunkc.runtime.distributed.exchange import shard_in_slot
from chunkc.runtime.storage.maps import drop_pages
from chunkc.runtime.store.consumed_gradients import LocalGradient

_COMPARED_NUMEL = 1 << 20
"""Elements compared at once, which takes a byte each on a GPU."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Replicated:
    """Replicated chunks, which stay on the compute tier.

    Attributes:
        current: groups with parameters here, as all ranks had them at home when they were gathered.
        waiting: gradients here that ranks have not exchanged yet, each with whether home has one to add to.
    """

    current: set[int] = field(default_factory=set)
    waiting: dict[Chunk, dict[str, bool]] = field(default_factory=dict)
    _buffers: dict[Chunk, torch.Tensor] = field(default_factory=dict)

    def room(self, chunk: Chunk, group: ChunkGroup, tier: Tier) -> torch.Tensor:
        """Return a chunk's buffer with its contents, allocated at the first call."""
        if chunk not in self._buffers:
            self._buffers[chunk] = tier.allocate_slot(group.replicated_numel(chunk), group.dtype)
        return self._buffers[chunk]

    def is_outdated(self, group: ChunkGroup, home: torch.Tensor) -> bool:
        """Whether a group's parameters are not all here, or this rank's shards differ from those at home.

        Args:
            home: a flat tensor of the group's elements, as `ChunkGroup` describes them, on the compute tier's device.
        """
        if group.index not in self.current:
            return True
        here, bits = self._buffers[Chunk(PARAM, group.index)], _BITS[group.dtype.itemsize]
        is_same = all(
            torch.equal(*pieces)
            for where in group.slices
            for pieces in zip(
                shard_in_slot(here, where).view(bits).split(_COMPARED_NUMEL),
                home[where.offset : where.end].view(bits).split(_COMPARED_NUMEL),
                strict=True,
            )
        )
        drop_pages(home)
        return not is_same

    def local_gradients(self, groups: Iterable[int], parameter: Callable[[str], torch.Tensor]) -> list[str]:
        """Find parameters of groups with gradients that wait to be exchanged; drop those that user code has reset.

        Args:
            parameter: by name.
        """
        names: list[str] = []
        for index in sorted(groups):
            waiting = self.waiting.get(Chunk(GRAD, index), {})
            for name in sorted(waiting):
                if isinstance(parameter(name).grad, LocalGradient):
                    names.append(name)
                else:
                    del waiting[name]
        return names

    def keep(self, groups: Collection[int]) -> None:
        """Free the buffers of all groups but these."""
        self.current.intersection_update(groups)
        for chunk in [chunk for chunk in self._buffers if chunk.group not in groups]:
            del self._buffers[chunk]

    def clear(self) -> None:
        """Free all buffers."""
        self.current.clear()
        self.waiting.clear()
        self._buffers.clear()
