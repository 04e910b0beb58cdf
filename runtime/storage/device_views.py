"""Save and copy a device's views of home memory as home memory.

torch takes them for the device's own memory. `torch.save` would say so, and a plain `torch.load` fill the device;
`copy.deepcopy` would put a whole model there. So a storage over home memory is saved as the CPU's, and a copy of it is
home memory as well, which is freed with the last tensor over it.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkc.ir.errors import HomeError
from chunkc.runtime.device.gpu import Gpu
from chunkc.runtime.storage.homes import Home
from chunkc.runtime.storage.maps import Mapping, drop_pages
from chunkc.torch_private.copying import copied_by

_BEFORE_TORCH_S_OWN = 1
"""Priority of `torch.serialization.register_package`, before torch's own for CUDA's storages, 20."""


@dataclass(frozen=True)
class Viewed:
    """Home memory with views on a device.

    Attributes:
        home: returns the home for copies, or None once it is gone. A weak reference, for one: a strong one would keep
            the home's memory.
    """

    nbytes: int
    home: Callable[[], Home | None]
    gpu: Gpu


_viewed: dict[int, Viewed] = {}
"""Home memory by address, as long as views keep it. Finalizers pop from it, in any thread."""


def note_view(mapping: Mapping, home: Callable[[], Home | None], gpu: Gpu) -> None:
    """Note that a device has views of this memory, and which home is for copies of them."""
    _register()
    if mapping.address not in _viewed:
        _viewed[mapping.address] = Viewed(len(mapping.memory), home, gpu)
        weakref.finalize(mapping.memory, _viewed.pop, mapping.address, None).atexit = False


def home_memory_of(storage: Any) -> Viewed | None:
    """Find the home memory of a device's storage, of any of torch's classes; None if it is the device's own memory."""
    address = storage.data_ptr() if storage.device.type == "cuda" else 0
    if not address:
        return None
    memories = list(_viewed.items())
    return next((memory for begin, memory in memories if begin <= address < begin + memory.nbytes), None)


@functools.cache
def _register() -> None:
    torch.serialization.register_package(_BEFORE_TORCH_S_OWN, _location, lambda storage, location: None)
    copied_by(torch.UntypedStorage, _copied_storage)
    copied_by(nn.Parameter, _copied_parameter)


def _location(storage: Any) -> str | None:
    """Return the location that `torch.save` notes for a storage; None leaves it to torch's own packages."""
    return None if home_memory_of(storage) is None else "cpu"


def _copied_storage(storage: torch.UntypedStorage, memo: dict[int, Any]) -> torch.UntypedStorage | None:
    """Copy a storage to new home memory, by the host; None if it is no home memory.

    Raises:
        HomeError: the home has no room, or is gone.
    """
    memory = home_memory_of(storage)
    if memory is None:
        return None
    home = memory.home()
    if home is None:
        raise HomeError("the tensor's disk home is gone with its model: copy by `tensor.detach().cpu()`")
    memory.gpu.synchronize()  # enqueued work may write to it, on any thread's stream
    nbytes = storage.nbytes()
    source = torch.frombuffer((ctypes.c_char * nbytes).from_address(storage.data_ptr()), dtype=torch.uint8)
    region = home.allocate(nbytes)
    try:
        view, target = home.tensor(region, torch.uint8, (nbytes,), (1,), 0), home.bytes(region)
    finally:
        home.free(region)  # from here the views alone keep it
    target.copy_(source)
    for touched in (source, target):
        drop_pages(touched)
    return view.untyped_storage()


def _copied_parameter(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter | None:
    """Copy a parameter over home memory by its storage: torch would clone its data on the device."""
    is_plain = type(parameter.data) is torch.Tensor and parameter.layout is torch.strided
    if not is_plain or parameter.device.type != "cuda":
        return None
    storage = _copied_storage(parameter.untyped_storage(), memo)
    if storage is None:
        return None
    data = torch.empty(0, dtype=parameter.dtype, device=storage.device)
    data.set_(storage, parameter.storage_offset(), parameter.shape, parameter.stride())
    return nn.Parameter(data, parameter.requires_grad)
