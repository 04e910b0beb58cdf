"""Used by several files of this room."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

MIB = 1 << 20


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def raiser(error: BaseException) -> Callable[[], None]:
    """A job that fails."""

    def job() -> None:
        raise error

    return job
