"""Slots: a chunk's room on the compute tier, what is happening to it, and what has been copied in all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chunkc.runtime.states import ChunkState
from chunkc.runtime.tier import Moment, Tier


@dataclass
class Slot:
    """A chunk's room on the compute tier and what is happening to it."""

    state: ChunkState = ChunkState.FREE
    buffer: torch.Tensor | None = None
    copy: Moment | None = None
    dirty: bool = False


class SpareSlots:
    """What evicted chunks left and no other has taken since."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def give(self, buffer: torch.Tensor) -> None:
        self._buffers.append(buffer)

    def take(self, tier: Tier, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The room of a chunk that has just gone, if it is of the same size; else new room."""
        nbytes = [buffer.nbytes for buffer in self._buffers]
        if numel * dtype.itemsize in nbytes:
            return self._buffers.pop(nbytes.index(numel * dtype.itemsize)).view(dtype)
        self.drop()
        return tier.allocate_slot(numel, dtype)

    def drop(self) -> None:
        """Give all of it back to the tier."""
        self._buffers.clear()


@dataclass
class Traffic:
    """Bytes copied and seconds waited since the store was made."""

    to_device_nbytes: int = 0
    to_home_nbytes: int = 0
    wait_s: float = 0.0


def fill_with_nan(buffer: torch.Tensor) -> None:
    """Make a read of what is not there show."""
    buffer.view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype


def length(entries: slice) -> int:
    """How many entries a slice with both ends has."""
    return entries.stop - entries.start
