"""Describe the machine of a result: hardware, versions, commit, memory."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pynvml

from chunkc.machines.host import compute_tier_memory

_ROOT = Path(__file__).resolve().parents[2]
_PEERS = ("torchao", "bitsandbytes", "deepspeed", "transformers")


def hardware() -> dict[str, Any]:
    """The processor's name, the cores this process may use, the machine's RAM in bytes, its system, its GPU."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return {
        "cpu": cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1,
        "ram_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        **_gpu(),
    }


def available_ram_nbytes() -> int:
    """Free RAM, as far as this process may use it."""
    return compute_tier_memory()[1]


def gpu_nbytes() -> int | None:
    """The first GPU's memory by the driver, without making a context on it; None where there is none."""
    return _gpu().get("gpu_memory_nbytes")


def cpu_name() -> str:
    """The model's name as the kernel knows it, else what Python knows of it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, Any]:
    """Python's, torch's, the peers' that are installed, and chunkc's commit (None outside a git repository)."""
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        **{name: version for name in ("triton", *_PEERS) if (version := _version(name)) is not None},
        "commit": _git("rev-parse", "HEAD"),
        "has_changes": bool(changes),
    }


def _gpu() -> dict[str, Any]:
    """Name, memory and driver of the first GPU; {} where there is none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        if not pynvml.nvmlDeviceGetCount():
            return {}
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "gpu": pynvml.nvmlDeviceGetName(device),
            "gpu_memory_nbytes": pynvml.nvmlDeviceGetMemoryInfo(device).total,
            "driver": pynvml.nvmlSystemGetDriverVersion(),
        }
    finally:
        pynvml.nvmlShutdown()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Run git on this repository; None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
