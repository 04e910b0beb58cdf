"""The compute tier: the one place, with streams and homes, that knows what kind of device computes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from chunkc.runtime import cpu_allocator
from chunkc.runtime.streams import WorkerStream


class CpuTier:
    """RAM as the memory the model computes in. Slots come from torch's own CPU allocator, exactly sized.

    Args:
        delay: race tests only: seconds to sleep before every copy.
    """

    device = torch.device("cpu")

    def __init__(self, *, delay: Callable[[], float] | None = None) -> None:
        self.to_device = WorkerStream("to_device", delay=delay)
        self.to_home = WorkerStream("to_home", delay=delay)

    def allocate_slot(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat, uninitialised buffer."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def measured_nbytes(self) -> int | None:
        """Bytes in use on the tier, or None where nothing meters it (see `runtime.cpu_allocator`)."""
        return cpu_allocator.current_nbytes() if cpu_allocator.is_installed() else None

    def lap_peak_nbytes(self) -> int | None:
        """The peak since the last call of this, or None where nothing meters the tier."""
        return cpu_allocator.lap_peak_nbytes() if cpu_allocator.is_installed() else None

    def drain(self) -> None:
        """Wait for every copy."""
        self.to_device.drain()
        self.to_home.drain()
