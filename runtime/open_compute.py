"""The memory a model computes in and the homes behind it, for a device."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

from chunkc.ir.errors import UnsupportedError
from chunkc.runtime.arena import Arena
from chunkc.runtime.cuda import CudaTier
from chunkc.runtime.gpu import TorchGpu
from chunkc.runtime.homes import open_home
from chunkc.runtime.staging import open_arena
from chunkc.runtime.tier import CpuTier, Tier

logger = logging.getLogger(__name__)


def splits_exactly(environment: Mapping[str, str]) -> bool:
    """Whether torch's CUDA allocator splits large blocks exactly, as plans reckon: only with expandable segments.

    Otherwise a block may keep 1 MiB or less that is left over (`should_split`, see `passes.cuda_memory`).

    Args:
        environment: of the process; the newer name of the variable goes before the older one.
    """
    config = environment.get("PYTORCH_ALLOC_CONF", environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return "expandable_segments:true" in config.replace(" ", "").lower()


def open_compute(device: torch.device, home: str, disk_holds_everything: bool) -> tuple[Tier, Arena]:
    """The compute tier on a device, and the homes that an option names: `"cpu"`, `"disk"` or `"disk:DIR"`.

    Args:
        disk_holds_everything: a disk is the home of all model data; else of optimizer states, and RAM is of the rest.

    Raises:
        UnsupportedError: chunkc does not compute on such a device, torch cannot use it, or it cannot read files in
            place and a disk is to hold everything.
        OptionsError: the option names no home.
        HomeError: the directory cannot be used, or the buffers for it cannot be pinned.
    """
    if device.type == "cpu":
        opened = open_home(home)
        return CpuTier(), Arena(opened) if disk_holds_everything else Arena(open_home("cpu"), opened)
    if device.type == "cuda":
        gpu = TorchGpu(device.index)
        if not splits_exactly(os.environ):
            logger.warning(
                "torch's allocator may keep up to 1 MiB beyond each large block, which no plan counts: set "
                "PYTORCH_ALLOC_CONF=expandable_segments:True before the first CUDA call"
            )
        return CudaTier(gpu), open_arena(home, gpu, disk_holds_everything)
    raise UnsupportedError(f"device is {str(device)!r}; chunkc computes on the CPU and on CUDA devices")
