"""The machine as the scheduler sees it: what arithmetic and each link can do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """Rates that copies are placed against. They decide when a copy starts, never whether a plan is right.

    Units: operations per second, bytes per second.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    to_device_bytes_per_s: float
    to_home_bytes_per_s: float


CPU = Hardware(flops_per_s=1.0e11, memory_bytes_per_s=1.5e10, to_device_bytes_per_s=2.0e9, to_home_bytes_per_s=1.5e9)
"""A few cores with a disk behind the page cache: cautious round figures."""
