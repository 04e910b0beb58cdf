"""Where a result comes from: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent


def hardware() -> dict[str, Any]:
    """The processor's name, the cores this process may use, the machine's RAM in bytes, its system."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "cpu": cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1,
        "ram_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The model's name as the kernel knows it, else what Python knows of it."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, Any]:
    """Python's, torch's, and chunkc's commit (None outside a git repository)."""
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "commit": _git("rev-parse", "HEAD"),
        "has_changes": bool(changes),
    }


def _git(*arguments: str) -> str | None:
    """What git says of this repository; None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
