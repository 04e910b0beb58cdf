"""Home memory for tensors that no layout knows yet: a model that is being built.

Each tensor has a region of its own, which is given back with the last tensor over it. So when parameters move into
chunks, the memory that they were born in goes with each of them.
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
"""A smaller tensor would take a page as well; it stays where it is."""


@dataclass(frozen=True)
class UnassignedMemory:
    """Where tensors are born: homes, and the options that name them.

    Attributes:
        opened: the home of parameters.
        of_states: the home of optimizer states, which are loaded before there are chunks.
    """

    home: str
    disk_holds: str
    opened: Home = field(compare=False, repr=False)
    of_states: Home = field(compare=False, repr=False)

    @torch.no_grad()
    def copy_of(self, values: torch.Tensor) -> torch.Tensor:
        """A dense CPU tensor's values, in new home memory; its pages on a disk have left the RAM.

        Raises:
            HomeError: the home has no room.
        """
        found, memory = _room(self.opened, values.dtype, tuple(values.shape), values.stride())
        address = found.data_ptr()
        _memory_by_address[address] = self
        weakref.finalize(memory, _memory_by_address.pop, address, None).atexit = False
        found.copy_(values)
        drop_pages(found)
        return found

    def room_for_state(self, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """Zeros in new home memory, for a state of what was born here.

        Raises:
            HomeError: the home has no room.
        """
        return _room(self.of_states, dtype, shape, stride)[0]


def unassigned_memory_at(home: str, disk_holds: str, *, disk_holds_parameters: bool) -> UnassignedMemory:
    """Open the homes that options name.

    Raises:
        HomeError: the directory cannot be used.
    """
    of_states = open_home(home)
    return UnassignedMemory(home, disk_holds, of_states if disk_holds_parameters else open_home("cpu"), of_states)


def _room(home: Home, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> tuple[torch.Tensor, Any]:
    """A dense tensor in a region of its own, which goes with it; and the region's memory."""
    region = home.allocate(math.prod(shape) * dtype.itemsize)
    try:
        return home.tensor(region, dtype, tuple(shape), tuple(stride), 0), home.memory(region)
    finally:
        home.free(region)  # from now on the tensor alone keeps it


_memory_by_address: dict[int, UnassignedMemory] = {}
"""By the address of their storage, which is their own: tensors that are still where they were born."""


def unassigned_memory_of(tensor: torch.Tensor) -> UnassignedMemory | None:
    """Where a tensor was born, if it still lies there, or is a view of one that does."""
    if not _memory_by_address or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    return _memory_by_address.get(tensor.untyped_storage().data_ptr())


_memory_by_parameter: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The nursery of each parameter that was born in one, wherever its data lies."""


def note_unassigned_memory(parameter: torch.Tensor, unassigned_memory: UnassignedMemory) -> None:
    """Remember where a parameter was born."""
    _memory_by_parameter[parameter] = unassigned_memory


def unassigned_memory_of_parameter(parameter: torch.Tensor) -> UnassignedMemory | None:
    """Where a parameter was born, though its data has been replaced since (`model.half()`)."""
    return unassigned_memory_of(parameter) or _memory_by_parameter.get(parameter)
