"""Allocate home memory for tensors that are in no layout yet: of a model that is being built.

Each tensor has a region of its own, which is freed with the last tensor over it. So when parameters move into chunks,
each one's unassigned memory is freed as it moves.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from chunkc.runtime.storage.homes import Home, open_home
from chunkc.runtime.storage.maps import drop_pages

SMALLEST_NBYTES = mmap.PAGESIZE
"""Smaller tensors would take a page as well; they stay where they are."""


@dataclass(frozen=True)
class UnassignedMemory:
    """Homes of tensors that are in no chunk yet, and the options that name these homes.

    Attributes:
        parameter_home: the home of parameters.
        state_home: the home of optimizer states, which may be loaded before there are chunks.
    """

    home: str
    disk_holds: str
    parameter_home: Home = field(compare=False, repr=False)
    state_home: Home = field(compare=False, repr=False)

    @torch.no_grad()
    def copy_of(self, values: torch.Tensor) -> torch.Tensor:
        """Copy a dense CPU tensor into new home memory; on a disk, its pages have left the RAM.

        Raises:
            HomeError: the home has no room.
        """
        tensor, memory = _allocate(self.parameter_home, values.dtype, tuple(values.shape), values.stride())
        address = tensor.data_ptr()
        _memory_by_address[address] = self
        weakref.finalize(memory, _memory_by_address.pop, address, None).atexit = False
        tensor.copy_(values)
        drop_pages(tensor)
        return tensor

    def room_for_state(self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """Allocate zeros in new home memory, for an optimizer state of a parameter here.

        Raises:
            HomeError: the home has no room.
        """
        return _allocate(self.state_home, dtype, shape, stride)[0]


def unassigned_memory_at(home: str, disk_holds: str, *, disk_holds_parameters: bool) -> UnassignedMemory:
    """Open the homes that options name.

    Raises:
        HomeError: the directory cannot be used.
    """
    named = open_home(home)
    return UnassignedMemory(home, disk_holds, named if disk_holds_parameters else open_home("cpu"), named)


def _allocate(home: Home, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> tuple[torch.Tensor, Any]:
    """Make a dense tensor in a region of its own, freed with the tensor; return it and the region's memory."""
    region = home.allocate(math.prod(shape) * dtype.itemsize)
    try:
        return home.tensor(region, dtype, tuple(shape), tuple(stride), 0), home.memory(region)
    finally:
        home.free(region)  # from here the tensor alone keeps it


_memory_by_address: dict[int, UnassignedMemory] = {}
"""Unassigned memory by the address of a tensor's storage, which is its own."""


def unassigned_memory_of(tensor: torch.Tensor) -> UnassignedMemory | None:
    """Return the unassigned memory in which a tensor lies, itself or as a view; None if in none."""
    if not _memory_by_address or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    return _memory_by_address.get(tensor.untyped_storage().data_ptr())


_memory_by_parameter: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Unassigned memory in which each parameter was made, wherever its data lies now."""


def note_unassigned_memory(parameter: torch.Tensor, unassigned_memory: UnassignedMemory) -> None:
    """Note the unassigned memory in which a parameter was made."""
    _memory_by_parameter[parameter] = unassigned_memory


def unassigned_memory_of_parameter(parameter: torch.Tensor) -> UnassignedMemory | None:
    """Return the unassigned memory of a parameter, though its data may have been replaced since (`model.half()`)."""
    return unassigned_memory_of(parameter) or _memory_by_parameter.get(parameter)
