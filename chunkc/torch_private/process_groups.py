"""Groups of processes with communicators of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def with_own_communicators() -> Iterator[None]:
    """Inside, a new group connects its ranks by itself.

    Where the default group has a device (`init_process_group(device_id=...)`), PyTorch would split its communicator,
    for which all ranks have to come, and not only the new group's.
    """
    default: Any = dist.group.WORLD
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def abort(group: dist.ProcessGroup, device_type: str) -> None:
    """End what a group's backend for a kind of device has under way, and let nothing more be done by it."""
    backend: Any = group._get_backend(torch.device(device_type))
    backend.abort()
