"""Compute the bytes that torch's CUDA caching allocator takes for a request, and those of cuBLAS's workspaces.

Sources: `c10/core/AllocatorConfig.h` and `c10/cuda/CUDACachingAllocator.cpp` (`round_size`, `should_split`),
`aten/src/ATen/cuda/CublasHandlePool.cpp` (`parseChosenWorkspaceSize`) and `aten/src/ATen/cuda/CUDABlas.cpp`
(`_parseChosenWorkspaceSize`) of PyTorch 2.11 to 2.13. Where cuBLASLt has a workspace of its own is as the GPU made of
RAM showed it with 2.13 (`tests/gpu_in_ram`).

Plans assume expandable segments (`PYTORCH_ALLOC_CONF=expandable_segments:True`, which a session switches on, or warns
if the user has decided otherwise): every block is the request, rounded to 512 bytes; the bytes of a freed chunk serve
activations of any size at once, as all large blocks lie in one range of addresses; and free pages are given back when
memory runs short. The driver gives pages of 2 MiB (small blocks) and 20 MiB (large ones), so that torch reserves
somewhat more than it hands out: a limit on reserved bytes (`torch.cuda.set_per_process_memory_fraction`) needs that
much above the plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

GRANULE_NBYTES = 512
"""Granule of the allocator: the size of every block is a multiple of it."""

_KIB = 1024
_CONFIG = re.compile(r":([0-9]+):([0-9]+)")
_LT_DEFAULT_KIB = 1024
_HOPPER = 9


def rounded_nbytes(nbytes: int, granule_nbytes: int = GRANULE_NBYTES) -> int:
    """Round a request up to the bytes it takes if its block can be split exactly; 0 stays 0."""
    return -(-nbytes // granule_nbytes) * granule_nbytes


def cublas_workspace_nbytes(capability: tuple[int, int], config: str | None = None) -> int:
    """Return the bytes of the workspace that torch's allocator gives cuBLAS per handle and stream, for good.

    Args:
        capability: compute capability of the device.
        config: `CUBLAS_WORKSPACE_CONFIG`, if it is set: sizes in KiB and counts, such as `:4096:2:16:8`.
    """
    if config is not None:
        pairs = [(int(size), int(count)) for size, count in _CONFIG.findall(config)]
        # torch adds up the sizes or size times count, depending on its version: the larger bounds both.
        return sum(size * max(1, count) * _KIB for size, count in pairs) if pairs else 4096 * _KIB
    return 4096 * 8 * _KIB if capability[0] >= _HOPPER else (4096 * 2 + 16 * 8) * _KIB


def cublaslt_workspace_nbytes(config: str | None = None) -> int:
    """Return the bytes of cuBLASLt's workspace, in addition to cuBLAS's unless the two share one.

    Args:
        config: `CUBLASLT_WORKSPACE_SIZE`, if it is set: KiB.
    """
    return (int(config) if config is not None and config.isdigit() else _LT_DEFAULT_KIB) * _KIB


def shares_workspaces(environment: Mapping[str, str]) -> bool:
    """Whether cuBLASLt works in cuBLAS's workspace: from PyTorch 2.13 on, unless the environment says otherwise."""
    setting = environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    return setting == "1" if setting in ("0", "1") else hasattr(torch.backends.cuda, "cublas_workspace_size")


def workspaces_nbytes(blas_nbytes: int, lt_nbytes: int, *, shared: bool = False) -> int:
    """Return the bytes that cuBLAS and cuBLASLt keep on the device for one compute stream and two threads.

    The threads are the user's and autograd's. Each has a cuBLAS handle of its own, and each handle a workspace per
    stream.

    Args:
        blas_nbytes, lt_nbytes: of one workspace of cuBLAS, and of cuBLASLt.
        shared: cuBLASLt has none of its own (see `shares_workspaces`).
    """
    num_handles = 2
    own_nbytes = 0 if shared and blas_nbytes else rounded_nbytes(lt_nbytes)
    return num_handles * (rounded_nbytes(blas_nbytes) + own_nbytes)


def default_workspaces_nbytes(capability: tuple[int, int]) -> int:
    """Return `workspaces_nbytes` for a device that is not there: every PyTorch, no settings in the environment."""
    return workspaces_nbytes(cublas_workspace_nbytes(capability), cublaslt_workspace_nbytes())
