"""Connect the processes of a launcher, also after it has restarted them: `chunkc.init_process_group`.

`torchrun` gives every attempt the same store, with everything that earlier attempts left in it. PyTorch's own
`init_process_group` reads addresses of ended processes there, and waits until its timeout. The number of restarts
cannot tell attempts apart: each host counts its own, and does not count when another host leaves or joins. So ranks
first agree on a name that no attempt has used, and connect under it as the prefix of the store's keys.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from chunkc.ir.errors import DistributedError, OptionsError

TIMEOUT_S = 300.0
"""Seconds that ranks wait for each other by default."""

_POLL_S = 0.01


def init_process_group(timeout_s: float = TIMEOUT_S) -> None:
    """Initialise `torch.distributed` so that `torchrun --max-restarts` works: gloo, and NCCL if there are GPUs.

    Reads the environment that a launcher sets (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`). Without `RANK`,
    this process is the only rank.

    Args:
        timeout_s: seconds that a rank waits for the others, here and in PyTorch's own collectives.

    Raises:
        OptionsError: the timeout is not positive.
        DistributedError: a rank has not come in time.
    """
    check_timeout(timeout_s)
    if "RANK" not in os.environ:
        alone = timedelta(seconds=timeout_s)
        dist.init_process_group(_backends(), store=dist.HashStore(), rank=0, world_size=1, timeout=alone)
        return
    meet(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout_s)


def is_timeout(value: object) -> bool:
    """Whether a value is a positive number of seconds."""
    return isinstance(value, (int, float)) and value > 0


def check_timeout(timeout_s: object) -> None:
    """Raise OptionsError if it is no timeout."""
    if not is_timeout(timeout_s):
        raise OptionsError(f"timeout_s is {timeout_s!r}; allowed: a positive number of seconds")


def meet(rank: int, world_size: int, timeout_s: float) -> None:
    """Initialise the process group as a given rank, by `MASTER_ADDR` and `MASTER_PORT` in the environment.

    Raises:
        DistributedError: a rank has not come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
        name = _agreed_name(store, rank, world_size, timeout)
        dist.init_process_group(
            _backends(), store=dist.PrefixStore(name, store), rank=rank, world_size=world_size, timeout=timeout
        )
    except dist.DistError as error:
        raise DistributedError(
            f"rank {rank} of {world_size} has not met all others within {timeout_s:g} s: look for the first error of "
            f"any rank, and start all anew ({error})"
        ) from error


def _backends() -> str:
    return "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and torch.cuda.is_available() else "gloo"


def _agreed_name(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Agree on a random name that rank 0 makes; the store may have keys of earlier attempts.

    Each other rank sets a random token as its hello, and accepts only the answer to that token. Rank 0 may read a hello
    of an earlier attempt; so it answers every new token until each rank has confirmed the name.

    Raises:
        torch.distributed.DistStoreError: a rank has not come in time.
    """
    own = secrets.token_hex(8)
    if rank != 0:
        store.set(f"chunkc/hello/{rank}", own)
        store.wait([f"chunkc/answer/{own}"], timeout)
        name = store.get(f"chunkc/answer/{own}").decode()
        store.set(f"chunkc/{name}/knows/{rank}", "")
        return f"chunkc/{name}"
    answered: set[str] = set()
    missing = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"chunkc/{own}/knows/{other}"]):
                missing.discard(other)
            elif store.check([f"chunkc/hello/{other}"]):
                hello = store.get(f"chunkc/hello/{other}").decode()
                if hello not in answered:
                    answered.add(hello)
                    store.set(f"chunkc/answer/{hello}", own)
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(f"rank {', '.join(map(str, sorted(missing)))} did not come")
        time.sleep(_POLL_S if missing else 0)
    return f"chunkc/{own}"
