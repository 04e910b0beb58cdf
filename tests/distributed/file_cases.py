"""What ranks do with files of weights; run as `rank_cases` is."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parent))

import rank_cases
from checkpoint_cases import attempted
from rank_cases import Result, made, mesh

import chunkc

SHARD_NBYTES = 6000


def distributed(seed: int = 0, **how: Any) -> nn.Module:
    """Tied weights, rows that ranks cannot share evenly, and a buffer."""
    model = made(seed)
    model.register_buffer("count", torch.full((3,), float(seed)))
    return chunkc.distribute(model, mesh(), **how)


def digest(model: nn.Module) -> list[Any]:
    """Whole values, by name."""
    return [
        [name, (value.full_tensor() if isinstance(value, rank_cases.DTensor) else value).tolist()]
        for name, value in model.state_dict().items()
    ]


def saved(folder: Path) -> Result:
    """As one file and as several; only rank 0 is to write."""
    model = distributed()
    before = sorted(folder.iterdir()) if dist.get_rank() else []
    place = folder if dist.get_rank() == 0 else folder / "nowhere"
    chunkc.save(model, place / "one.safetensors")
    chunkc.save(model, place / "several", max_shard_size=SHARD_NBYTES)
    assert not (folder / "nowhere").exists(), before
    return {"whole": digest(model)}


def loaded(folder: Path) -> Result:
    found: Result = {}
    for name in ("one.safetensors", "several"):
        model = distributed(seed=1)
        keys = chunkc.load(model, folder / name)
        assert keys == ([], []), keys
        found[name] = digest(model)
    return found


def refused(folder: Path) -> Result:
    """What cannot be written or read on one rank."""
    model = distributed()
    chunkc.save(model, folder / "good")
    content = (folder / "good" / "model.safetensors").read_bytes() if dist.get_rank() == 0 else b""
    found: Result = {}
    real, calls = os.posix_fallocate, [0]

    def failing(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:  # in the middle of several files
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*args)

    with patch.object(os, "posix_fallocate", failing):
        found["full"] = attempted(lambda: chunkc.save(model, folder / "good", max_shard_size=SHARD_NBYTES))
    if dist.get_rank() == 0:
        found["left"] = sorted(path.name for path in (folder / "good").iterdir() if "-of-" not in path.name)
        found["as it was"] = (folder / "good" / "model.safetensors").read_bytes() == content
    place = folder / ("good" if dist.get_rank() == 0 else "nowhere")
    found["not there"] = attempted(lambda: chunkc.load(model, place))
    found["after"] = attempted(lambda: chunkc.load(model, folder / "good"))
    return found


if __name__ == "__main__":
    rank_cases.run_command_line(globals())
