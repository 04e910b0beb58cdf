"""Make a device mesh over fake ranks that compute layers together.

A user's factory calls `parallelize_module` with a dimension of it, as in training. Nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from chunkc.ir.errors import OptionsError
from chunkc.ir.hardware import Hardware

HOSTS, DATA, LAYERS = "hosts", "dp", "tp"
"""The mesh's dimensions: of copies, if there are several, of shards, and of ranks that compute a layer together."""


@contextmanager
def fake_mesh(hardware: Hardware) -> Iterator[DeviceMesh | None]:
    """Make this process rank 0 of fake ranks, one for each of the hardware's devices, and yield their mesh.

    Yields None, and makes no ranks, if devices do not compute layers together.

    Raises:
        OptionsError: this process is in a process group already.
    """
    if hardware.devices_per_layer == 1:
        yield None
        return
    if dist.is_initialized():
        raise OptionsError(
            "this process is in a process group of torch.distributed already, and chunkc explain makes one of fake "
            "ranks: start it by itself, without torchrun"
        )
    sizes = {HOSTS: hardware.num_copies, DATA: hardware.devices_per_row, LAYERS: hardware.devices_per_layer}
    if hardware.num_copies == 1:
        del sizes[HOSTS]
    dist.init_process_group("fake", rank=0, world_size=hardware.num_devices)
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()
