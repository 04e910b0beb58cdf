"""Ranks meet in a store, whatever those of an earlier attempt have left there."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import chunkc
from chunkc.distributed.process_group import _agreed_name

SOON = timedelta(seconds=30)


def met(store: dist.Store, num_ranks: int, late: int = -1) -> set[str]:
    """What each rank of an attempt takes for its name; one of them comes late."""
    names: list[str] = []

    def come(rank: int) -> None:
        names.append(_agreed_name(store, rank, num_ranks, SOON))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(num_ranks)]
    order = [thread for rank, thread in enumerate(threads) if rank != late] + threads[late : late + 1]
    for thread in order:
        thread.start()
        if thread is not order[-1]:
            thread.join(0.05)
    for thread in threads:
        thread.join()
    assert len(names) == num_ranks
    return set(names)


def test_ranks_of_each_attempt_have_a_name_of_their_own(tmp_path: Path) -> None:
    """A file that processes share, as the store of `torchrun` is: whoever is late, in whatever attempt, and with fewer
    ranks than before."""
    store = dist.FileStore(str(tmp_path / "store"), -1)
    attempts = [met(store, 3), met(store, 3, late=0), met(store, 3, late=2), met(store, 2), met(store, 1)]
    assert all(len(names) == 1 for names in attempts), "all ranks of an attempt have one name"
    assert len(set.union(*attempts)) == len(attempts), "no attempt has the name of another one"


def test_a_rank_that_does_not_come_is_named() -> None:
    store = dist.HashStore()
    with pytest.raises(dist.DistStoreError, match="rank 1, 2 did not come"):
        _agreed_name(store, 0, 3, timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError):
        _agreed_name(store, 1, 3, timedelta(seconds=0.1))


def test_a_process_without_a_launcher_is_the_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delitem(os.environ, name, raising=False)
    chunkc.init_process_group()
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    finally:
        dist.destroy_process_group()


def test_a_launcher_that_is_gone_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in said.items():
        monkeypatch.setitem(os.environ, name, value)
    monkeypatch.delitem(os.environ, "TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(chunkc.DistributedError, match="rank 1 of 2 has not met all others within 1 s"):
        chunkc.init_process_group(timeout_s=1)
    with pytest.raises(chunkc.OptionsError, match="timeout_s is 0"):
        chunkc.init_process_group(timeout_s=0)
