"""Bytes that an operator takes."""

from __future__ import annotations

from typing import Any

from chunkc.runtime.device import cpu_allocator


def measure(target: Any, args: tuple, kwargs: dict) -> tuple[int, Any]:
    """Return the bytes at the operator's peak beyond its inputs and outputs, and its outputs."""
    before = cpu_allocator.current_nbytes()
    cpu_allocator.reset_peak()
    outputs = target(*args, **kwargs)
    return cpu_allocator.peak_nbytes() - max(cpu_allocator.current_nbytes(), before), outputs
