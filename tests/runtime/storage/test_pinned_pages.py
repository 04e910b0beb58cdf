"""What home memory that is pinned asks of the system: large pages, as pinning takes time per page, no forks,
and to be near the GPU."""

from __future__ import annotations

import logging
from pathlib import Path

import forked
import pytest
from fake_gpu import FakeGpu

from chunkc.runtime.device import numa
from chunkc.runtime.storage.pinned import PinnedHome

NUMA_MAPS = Path("/proc/self/numa_maps")
SMAPS = Path("/proc/self/smaps")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_at(address: int) -> list[str]:
    """The kernel's flags of the mapping that has an address."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(part, 16) for part in words[0].split("-"))
            inside = begin <= address < end
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError("no mapping has this address")


@pytest.mark.skipif(not (SMAPS.exists() and HUGE_PAGES.exists()), reason="this kernel has no large pages to ask for")
def test_regions_ask_for_large_pages() -> None:
    home = PinnedHome(FakeGpu())
    region = home.allocate(8 << 20)
    assert "hg" in flags_at(home.bytes(region).data_ptr())


@pytest.mark.skipif(not SMAPS.exists(), reason="this kernel does not say how it treats memory")
def test_no_child_of_a_fork_gets_a_copy() -> None:
    home = PinnedHome(FakeGpu())
    assert "dc" in flags_at(home.bytes(home.allocate(1 << 20)).data_ptr())


def test_a_system_without_them_declines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmap.MADV_HUGEPAGE", -1, raising=False)  # an advice that no kernel knows
    home = PinnedHome(FakeGpu())
    region = home.allocate(1 << 20)
    assert int(home.bytes(region).sum()) == 0
    assert home.pinned_nbytes == 1 << 20


def policy_at(address: int) -> str:
    """Where the kernel takes pages from for the mapping that begins at an address."""
    lines = (line.split() for line in NUMA_MAPS.read_text().splitlines())
    return next(words[1] for words in lines if int(words[0], 16) == address)


@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="this kernel knows of no nodes")
@pytest.mark.parametrize(("node", "expected"), [(0, "prefer:0"), (None, "default"), (900, "default")])
def test_regions_come_from_the_node_that_the_gpu_is_on(
    node: int | None, expected: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chunkc.runtime.storage.pinned._LOG_EVERY_NBYTES", 1 << 20)
    home = PinnedHome(FakeGpu(node=node))
    with caplog.at_level(logging.INFO, "chunkc"):
        region = home.allocate(1 << 20)
    assert policy_at(home.bytes(region).data_ptr()) == expected
    assert ("on the GPU's NUMA node 0 while it has room" in caplog.text) == (expected == "prefer:0")


def test_a_device_s_node_is_what_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "PCI_DEVICES", tmp_path)
    for address, text in (("0000:65:00.0", "1\n"), ("0000:17:00.0", "-1\n")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(text)
    assert [numa.node_of(f"0000:{bus}:00.0") for bus in ("65", "17", "ca")] == [1, None, None]


@pytest.mark.second_tier
@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="this kernel knows of no nodes")
def test_what_numactl_has_chosen_stays(tmp_path: Path) -> None:
    script = """
import ctypes, mmap
from chunkc.runtime.device import numa
INTERLEAVE, SET_MEMPOLICY = 3, {"x86_64": 238, "aarch64": 237}[numa.platform.machine()]
assert numa._syscall(SET_MEMPOLICY, INTERLEAVE, ctypes.byref(ctypes.c_uint64(1)), ctypes.c_ulong(65)) == 0
memory = mmap.mmap(-1, 1 << 20)
assert not numa.prefer_node(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1 << 20, 0)
"""
    program = tmp_path / "program.py"
    program.write_text(script)
    done = forked.run(program)
    assert done.returncode == 0, done.stderr
