"""Open the compute tier of a device, and the homes behind it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

from chunkc.ir.errors import UnsupportedError
from chunkc.runtime.device.cuda import CudaTier
from chunkc.runtime.device.gpu import TorchGpu
from chunkc.runtime.device.tier import CpuTier, Tier
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.homes import open_home
from chunkc.runtime.storage.staging import open_arena
from chunkc.torch_private.cuda_allocator import use_expandable_segments

logger = logging.getLogger(__name__)


def split_exactly(environment: Mapping[str, str]) -> None:
    """Make torch's CUDA allocator split large blocks exactly, as plans assume: only expandable segments do.

    Otherwise a block may keep up to 1 MiB that is left over (`should_split`, see `passes.graphs.cuda_memory`), and free
    memory is fragmented. A user's other choice is kept, with a warning.

    Args:
        environment: of the process; as in PyTorch 2.13 (`CUDAAllocatorConfig.h`), the older name of the variable goes
            before the newer one.
    """
    config = environment.get("PYTORCH_CUDA_ALLOC_CONF", environment.get("PYTORCH_ALLOC_CONF", ""))
    words = config.replace(" ", "").lower()
    if "expandable_segments:true" in words:
        return
    if "expandable_segments" in words or "backend:" in words:
        logger.warning(
            "torch's allocator may keep up to 1 MiB beyond each large block, which no plan counts: take "
            "expandable_segments:False, or the other backend, out of PYTORCH_ALLOC_CONF (it is %r)",
            config,
        )
        return
    use_expandable_segments()
    logger.info("torch's CUDA allocator: expandable segments from now on; PYTORCH_ALLOC_CONF does not say otherwise")


def open_compute(device: torch.device, home: str, disk_holds_everything: bool) -> tuple[Tier, Arena]:
    """Open the compute tier on a device, and the homes that an option names: `"cpu"`, `"disk"` or `"disk:DIR"`.

    Args:
        disk_holds_everything: a disk is the home of all model data; else of optimizer states, and RAM of the rest.

    Raises:
        UnsupportedError: chunkc does not compute on such a device, torch cannot use it, or it cannot read files in
            place and a disk is to hold everything.
        OptionsError: the option names no home.
        HomeError: the directory cannot be used, or the buffers for it cannot be pinned.
    """
    if device.type == "cpu":
        named = open_home(home)
        return CpuTier(), Arena(named) if disk_holds_everything else Arena(open_home("cpu"), named)
    if device.type == "cuda":
        gpu = TorchGpu(device.index)
        split_exactly(os.environ)
        return CudaTier(gpu), open_arena(home, gpu, disk_holds_everything)
    raise UnsupportedError(f"device is {str(device)!r}; chunkc computes on the CPU and on CUDA devices")
