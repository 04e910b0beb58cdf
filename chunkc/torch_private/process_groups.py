"""Make process groups with communicators of their own, abort them, and wrap their collectives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the operators
from torch.distributed.distributed_c10d import _resolve_process_group

functional_collectives = torch.ops._c10d_functional

_WITHOUT_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Environment variables that NCCL reads when a group is made."""


@contextmanager
def without_watchdog() -> Iterator[None]:
    """Let NCCL groups that are made inside the block have a watchdog that ends no process."""
    before = {name: os.environ.get(name) for name in _WITHOUT_WATCHDOG}
    os.environ.update(_WITHOUT_WATCHDOG)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def with_own_communicators() -> Iterator[None]:
    """Let a group that is made inside the block connect its ranks by itself.

    If the default group is bound to a device (`init_process_group(device_id=...)`), PyTorch would split its
    communicator, in which all ranks must take part, not only the new group's.
    """
    default: Any = dist.group.WORLD
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def abort(group: dist.ProcessGroup, device_type: str) -> None:
    """Abort the collectives of a group's backend for a kind of device; the backend can do nothing afterwards."""
    backend: Any = group._get_backend(torch.device(device_type))
    backend.abort()


Noting = Callable[[], AbstractContextManager[None]]
"""Makes the context in which a collective is launched."""

_looked_after: WeakKeyDictionary[dist.ProcessGroup, Noting] = WeakKeyDictionary()


def look_after(group: dist.ProcessGroup, noting: Noting) -> None:
    """Register a context for the model's GPU collectives in a group (see `chunkc.passes.graphs.collectives`)."""
    _looked_after[group] = noting


def looked_after(group_name: Any) -> AbstractContextManager[None]:
    """Make the context that is registered for collectives in a group; an empty one if there is none."""
    noting = _looked_after.get(_resolve_process_group(group_name))
    return nullcontext() if noting is None else noting()


def rank_in(group_name: Any) -> int:
    """Return this process's rank in the group that a functional collective names."""
    return dist.get_rank(_resolve_process_group(group_name))
