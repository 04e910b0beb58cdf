"""The memory of the machine at hand: its own, and what control groups leave of it."""

from pathlib import Path

import pytest

from chunkc.machines.host import compute_tier_memory


def _machine(root: Path, *, cgroup: str = "") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\nHugePages_Total: 0\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def _group(folder: Path, *, limit: str, current: int, file: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 7\nactive_file {file}\ninactive_file {file}\n")


GROUPS: dict[str, tuple[str, dict[str, tuple[str, int, int]], tuple[int, int]]] = {
    "none": ("", {}, (1000 * 1024, 600 * 1024)),
    "the tightest limit of nested ones": (
        "1:name=systemd:/x\n0::/a/b\n",
        {"a": ("300000", 250_000, 50_000), "a/b": ("max", 1, 0)},
        (300_000, 150_000),
    ),
    "in a container that sees its own as the root": ("0::/\n", {".": ("200000", 250_000, 0)}, (200_000, 0)),
    "above the machine": ("0::/gone\n", {".": ("9000000", 0, 0)}, (1000 * 1024, 600 * 1024)),
}
"""The process's control groups; of each its limit, current bytes and bytes of files; the memory, and what is free."""


@pytest.mark.parametrize("name", GROUPS)
def test_memory_under_control_groups(name: str, tmp_path: Path):
    cgroup, groups, expected = GROUPS[name]
    root = _machine(tmp_path, cgroup=cgroup)
    for folder, (limit, current, file) in groups.items():
        _group(root / "sys/fs/cgroup" / folder, limit=limit, current=current, file=file)
    assert compute_tier_memory(root) == expected


def test_memory_of_this_machine_and_where_there_is_no_proc(tmp_path: Path):
    for given in ((tmp_path,), ()):
        total, available = compute_tier_memory(*given)
        assert total >= available > 0
