"""What the host gives: memory, pages, what may be locked, the loopback interface, disk."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from measuring import machine

from chunkc.machines.host import compute_tier_memory
from gpu.fact_processes import Fact, info, judged

FULL = SMALL = None

_THP = Path("/sys/kernel/mm/transparent_hugepage")
_POPULATE_SINCE = (5, 14)
_IFF_UP = 1


def host(size: None) -> Iterator[Fact]:
    """Facts that need no device."""
    about = machine.hardware() | machine.versions()
    yield info("machine", **{key: value for key, value in about.items() if value is not None})
    total_nbytes, available_nbytes = compute_tier_memory()
    shared = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    disk = shutil.disk_usage(tempfile.gettempdir()).free
    yield info(
        "memory",
        total_nbytes=total_nbytes,
        available_nbytes=available_nbytes,
        shared_memory_free_nbytes=shared,
        temporary_disk_free_nbytes=disk,
    )
    yield _pages()
    soft, hard = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    yield info("locking", memlock_soft=soft, memlock_hard=hard)
    yield _loopback()


def _pages() -> Fact:
    """Homes ask for huge pages (madvise), and for pages by several threads (Linux 5.14)."""
    found = {name: _chosen(_THP / name) for name in ("enabled", "defrag")}
    kernel = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
    populates = kernel >= _POPULATE_SINCE
    holds = found["enabled"] in ("always", "madvise") and populates
    problem = "pinning maps pages of 4 KiB, or one thread alone finds them: minutes for 100 GiB"
    return judged(holds, "pages", problem, **found, kernel=platform.release(), page_nbytes=os.sysconf("SC_PAGE_SIZE"))


def _chosen(path: Path) -> str:
    """The word in brackets of a setting such as `always [madvise] never`."""
    try:
        return path.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return "unknown"


def _limit(value: int) -> int | str:
    return "unlimited" if value == resource.RLIM_INFINITY else value


def _loopback() -> Fact:
    """Ranks on one host meet through it."""
    try:
        flags = int(Path("/sys/class/net/lo/flags").read_text(), 16)
    except (OSError, ValueError):
        flags = 0
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2)
            with socket.create_connection(server.getsockname(), timeout=2) as mine, server.accept()[0] as other:
                mine.sendall(b"x")
                arrived = other.recv(1) == b"x"
        problem = "" if arrived else "what was sent to 127.0.0.1 did not arrive"
    except OSError as error:
        problem = f"127.0.0.1: {error}"
    return judged(not problem, "loopback", problem, is_up=bool(flags & _IFF_UP))
