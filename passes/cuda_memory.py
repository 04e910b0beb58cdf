"""What torch's CUDA caching allocator makes of a request, and what cuBLAS keeps: pure functions of sizes.

Sources: `c10/core/AllocatorConfig.h` and `c10/cuda/CUDACachingAllocator.cpp` (`round_size`, `should_split`),
`aten/src/ATen/cuda/CublasHandlePool.cpp` (`parseChosenWorkspaceSize`) and `aten/src/ATen/cuda/CUDABlas.cpp`
(`_parseChosenWorkspaceSize`) of PyTorch 2.11 to 2.13.

Plans reckon with expandable segments (`PYTORCH_ALLOC_CONF=expandable_segments:True`, which `bench/on_gpu.sh` and the
tests on a GPU set; without it a session warns): every block is what was asked for, rounded to 512 bytes; what one chunk
gives back serves activations of any size at once, as all large blocks lie in one range of addresses; and pages that lie
free are given back when memory runs short. What remains is that the driver gives pages of 2 MiB (small blocks) and
20 MiB (large ones), so that torch reserves somewhat more than it hands out: a limit on what is reserved
(`torch.cuda.set_per_process_memory_fraction`) needs that much above the plan.
"""

from __future__ import annotations

import re

GRANULE_NBYTES = 512
"""Every block is a multiple of this."""

_KIB = 1024
_CONFIG = re.compile(r":([0-9]+):([0-9]+)")
_LT_DEFAULT_KIB = 1024
_HOPPER = 9


def rounded_nbytes(nbytes: int, granule_nbytes: int = GRANULE_NBYTES) -> int:
    """Bytes that a request of `nbytes` takes where its block can be split exactly; nothing for nothing."""
    return -(-nbytes // granule_nbytes) * granule_nbytes


def cublas_workspace_nbytes(capability: tuple[int, int], config: str | None = None) -> int:
    """Bytes of the workspace that torch gives cuBLAS per handle and stream, from its own allocator, and keeps.

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
    """Bytes of cuBLASLt's workspace, which it needs beside cuBLAS's unless the two share one.

    Args:
        config: `CUBLASLT_WORKSPACE_SIZE`, if it is set: KiB.
    """
    return (int(config) if config is not None and config.isdigit() else _LT_DEFAULT_KIB) * _KIB


def workspaces_nbytes(
    capability: tuple[int, int], cublas_config: str | None = None, cublaslt_config: str | None = None
) -> int:
    """Bytes that libraries keep on the device for one compute stream and two threads: the user's and autograd's.

    Each thread has a cuBLAS handle of its own, and each handle a workspace per stream.
    """
    num_handles = 2
    blas = cublas_workspace_nbytes(capability, cublas_config)
    return num_handles * (rounded_nbytes(blas) + rounded_nbytes(cublaslt_workspace_nbytes(cublaslt_config)))
