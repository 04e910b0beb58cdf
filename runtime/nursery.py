"""Home memory for tensors that no layout knows yet: a model that is being built.

Each tensor has a region of its own, which is given back with the last tensor over it. So when parameters move into
chunks, the memory that they were born in goes with each of them.
"""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from chunkc.runtime.homes import Home
from chunkc.runtime.maps import drop_pages

SMALLEST_NBYTES = mmap.PAGESIZE
"""A smaller tensor would take a page as well; it stays where it is."""


@dataclass(frozen=True)
class Nursery:
    """Where tensors are born: a home, and the options that name it."""

    home: str
    disk_holds: str
    opened: Home = field(compare=False, repr=False)

    @torch.no_grad()
    def copy_of(self, values: torch.Tensor) -> torch.Tensor:
        """A dense CPU tensor's values, in new home memory; its pages on a disk have left the RAM.

        Raises:
            HomeError: the home has no room.
        """
        region = self.opened.allocate(values.nbytes)
        try:
            found = self.opened.tensor(region, values.dtype, tuple(values.shape), values.stride(), 0)
            memory = self.opened.memory(region)
        finally:
            self.opened.free(region)  # from now on `found` alone keeps it
        address = found.data_ptr()
        _born[address] = self
        weakref.finalize(memory, _born.pop, address, None).atexit = False
        found.copy_(values)
        drop_pages(found)
        return found


_born: dict[int, Nursery] = {}
"""By the address of their storage, which is their own: tensors that are still where they were born."""


def nursery_of(tensor: torch.Tensor) -> Nursery | None:
    """Where a tensor was born, if it still lies there, or is a view of one that does."""
    if not _born or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    return _born.get(tensor.untyped_storage().data_ptr())


_births: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The nursery of each parameter that was born in one, wherever its data lies."""


def note_birth(parameter: torch.Tensor, nursery: Nursery) -> None:
    """Remember where a parameter was born."""
    _births[parameter] = nursery


def birthplace_of(parameter: torch.Tensor) -> Nursery | None:
    """Where a parameter was born, though its data has been replaced since (`model.half()`)."""
    return nursery_of(parameter) or _births.get(parameter)
