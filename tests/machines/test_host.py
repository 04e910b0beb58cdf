"""The memory of the machine at hand: its own, and what control groups leave of it."""

from pathlib import Path

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


def test_memory_without_a_control_group(tmp_path: Path):
    assert compute_tier_memory(_machine(tmp_path)) == (1000 * 1024, 600 * 1024)


def test_memory_under_the_tightest_limit_of_nested_control_groups(tmp_path: Path):
    root = _machine(tmp_path, cgroup="1:name=systemd:/x\n0::/a/b\n")
    _group(root / "sys/fs/cgroup/a", limit="300000", current=250_000, file=50_000)
    _group(root / "sys/fs/cgroup/a/b", limit="max", current=1, file=0)
    assert compute_tier_memory(root) == (300_000, 150_000)


def test_memory_in_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path):
    root = _machine(tmp_path, cgroup="0::/\n")
    _group(root / "sys/fs/cgroup", limit="200000", current=250_000, file=0)
    assert compute_tier_memory(root) == (200_000, 0)


def test_a_limit_above_the_machine_changes_nothing(tmp_path: Path):
    root = _machine(tmp_path, cgroup="0::/gone\n")
    _group(root / "sys/fs/cgroup", limit="9000000", current=0, file=0)
    assert compute_tier_memory(root) == (1000 * 1024, 600 * 1024)


def test_memory_where_there_is_no_proc(tmp_path: Path):
    total, available = compute_tier_memory(tmp_path)
    assert total >= available > 0


def test_memory_of_this_machine():
    total, available = compute_tier_memory()
    assert total >= available > 0
