"""What the driver counts of a process's memory on the GPU: all of it, context and libraries too."""

from __future__ import annotations

from typing import Any


def process_nbytes(pid: int, nvml: Any = None) -> int | None:
    """Bytes that a process holds on the first GPU; None where the driver does not tell.

    In a container the driver knows processes by other numbers: then a single process must be the one that asks.

    Args:
        nvml: the module `pynvml`, or what stands for it.
    """
    if nvml is None:
        import pynvml as nvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(device)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    mine = [process for process in processes if process.pid == pid] or processes
    return mine[0].usedGpuMemory if len(mine) == 1 else None
