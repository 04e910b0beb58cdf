"""torch's CUDA allocator: its settings, and peaks of allocated bytes per lap.

torch has one peak per statistic and device, which each lap resets. Other code must not notice: peaks are kept before
they are reset, and torch's functions (`torch.cuda.max_memory_allocated`, `memory_stats`, `torch.accelerator`) return
the largest since their caller's last reset. They all go through four functions of `torch._C`, which the first lap of a
process wraps permanently.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_READERS = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
_RESETTERS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")

_lock = threading.RLock()
_before: dict[int, dict[str, Any]] = {}  # device index -> peaks that laps reset, nested like torch's
_read: Callable[[int], dict[str, Any]] | None = None
_reset: Callable[[int], None] | None = None


def lap_peak_nbytes(index: int) -> int:
    """Return the peak of allocated bytes on a CUDA device since the last call; 0 before CUDA is used."""
    with _lock:
        if _read is None:
            _wrap()
        assert _read is not None
        assert _reset is not None
        stats = _read(index)
        if not stats:  # CUDA has not been used yet
            return 0
        kept = _before.setdefault(index, {})
        _keep(stats, kept)
        _reset(index)
        return stats["allocated_bytes"]["all"]["peak"]


def use_expandable_segments() -> None:
    """Let torch's CUDA allocator use expandable segments from now on; segments that it has stay as they are."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _wrap() -> None:
    global _read, _reset
    _read, _reset = torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats
    for name in _READERS:
        if hasattr(torch._C, name):
            setattr(torch._C, name, _reader(getattr(torch._C, name)))
    for name in _RESETTERS:
        if hasattr(torch._C, name):
            setattr(torch._C, name, _resetter(getattr(torch._C, name)))


def _reader(original: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    def stats(index: int) -> dict[str, Any]:
        with _lock:
            found = original(index)
            _raise(found, _before.get(index, {}))
            return found

    return stats


def _resetter(original: Callable[[int], None]) -> Callable[[int], None]:
    def reset(index: int) -> None:
        with _lock:
            _before.pop(index, None)
            original(index)

    return reset


def _keep(stats: dict[str, Any], kept: dict[str, Any]) -> None:
    """Raise the peaks in `kept` to those of `stats`."""
    for name, value in stats.items():
        if isinstance(value, dict):
            _keep(value, kept.setdefault(name, {}))
        elif name == "peak" and value > kept.get(name, 0):
            kept[name] = value


def _raise(stats: dict[str, Any], kept: dict[str, Any]) -> None:
    """Raise the peaks in `stats` to those of `kept`."""
    for name, value in kept.items():
        if isinstance(value, dict):
            _raise(stats.get(name, {}), value)
        elif value > stats.get(name, 0):
            stats[name] = value
