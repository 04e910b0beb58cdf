"""The memory a model computes in and the homes behind it, for a device."""

from __future__ import annotations

import torch

from chunkc.ir.errors import UnsupportedError
from chunkc.runtime.arena import Arena
from chunkc.runtime.cuda import CudaTier
from chunkc.runtime.gpu import TorchGpu
from chunkc.runtime.homes import open_home
from chunkc.runtime.staging import open_arena
from chunkc.runtime.tier import CpuTier, Tier


def open_compute(device: torch.device, home: str) -> tuple[Tier, Arena]:
    """The compute tier on a device, and the homes that an option names: `"cpu"`, `"disk"` or `"disk:DIR"`.

    Raises:
        UnsupportedError: chunkc does not compute on such a device, or torch cannot use it.
        OptionsError: the option names no home.
        HomeError: the directory cannot be used, or the buffers for it cannot be pinned.
    """
    if device.type == "cpu":
        return CpuTier(), Arena(open_home(home))
    if device.type == "cuda":
        gpu = TorchGpu(device.index)
        return CudaTier(gpu), open_arena(home, gpu)
    raise UnsupportedError(f"device is {str(device)!r}; chunkc computes on the CPU and on CUDA devices")
