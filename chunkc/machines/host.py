"""Read the sizes of the local machine's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def compute_tier_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Return (total, available) bytes of RAM, the compute tier of a model that runs on the CPU.

    Linux: `MemTotal` and `MemAvailable` of /proc/meminfo, lowered to the tightest `memory.max` of the process's control
    group (version 2) and its parents. Page cache that is charged to a group counts as available, since the kernel drops
    it. Elsewhere (macOS): physical pages from `os.sysconf`; if it has no available pages, both are the total.

    Args:
        root: where `proc` and `sys` are mounted; tests give a directory of their own.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        page_nbytes = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page_nbytes
        knows_available = "SC_AVPHYS_PAGES" in os.sysconf_names
        return total, os.sysconf("SC_AVPHYS_PAGES") * page_nbytes if knows_available else total
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, used in _cgroup_limits(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use that cannot be dropped) of each control group with a limit, parents included."""
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return
    paths = [line[3:] for line in membership.read_text().splitlines() if line.startswith("0::")]
    for path in paths:
        group = Path(path.lstrip("/"))
        for folder in (root / "sys/fs/cgroup" / part for part in (group, *group.parents)):
            limit = folder / "memory.max"
            if not limit.exists() or (text := limit.read_text().strip()) == "max":
                continue
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            droppable = int(stat["active_file"]) + int(stat["inactive_file"])
            yield int(text), int((folder / "memory.current").read_text()) - droppable
