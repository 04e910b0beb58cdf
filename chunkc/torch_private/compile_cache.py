"""Keep entries in the folder of Inductor's cached code, and let `torch.compiler.save_cache_artifacts()` carry them.

An entry is a file of JSON named after its key, in `chunkc/` of Inductor's cache folder. Inductor's own results of
autotuning are such files, so entries travel as these do: as paths in that folder, with JSON. An artifact of a type of
chunkc's own would not do: a process that has not imported chunkc, and so does not know it, would load no artifact at
all, Inductor's included.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.codecache import write_atomic
from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact
from torch._inductor.runtime.runtime_utils import cache_dir
from torch.compiler._cache import CacheArtifactManager

_FOLDER = "chunkc"


def is_on() -> bool:
    """Whether the user lets Inductor keep compiled code, and so chunkc what belongs to it."""
    return config.fx_graph_cache and not torch.compiler.config.force_disable_caches


def read(key: str) -> Any:
    """Return an entry's content; None: there is none, or its file cannot be read or is no JSON."""
    try:
        return json.loads(_path(key).read_bytes())
    except (OSError, ValueError):
        return None


def write(key: str, content: Any) -> None:
    """Write an entry: other processes find all of it or nothing. Where none can be written, nothing is kept.

    Args:
        key: a name for a file.
        content: what JSON can represent.
    """
    with suppress(OSError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(str(path), AutotuneCacheArtifact.encode(content))


def carry(key: str, content: Any) -> None:
    """Let `save_cache_artifacts` carry an entry, and `load_cache_artifacts` write it elsewhere."""
    CacheArtifactManager.record_artifact(AutotuneCacheArtifact.type(), f"{_FOLDER}/{key}", content)


def _path(key: str) -> Path:
    return Path(cache_dir(), _FOLDER, key)
