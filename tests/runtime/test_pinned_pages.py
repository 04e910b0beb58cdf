"""What home memory that is pinned asks of the system: large pages, as pinning takes time per page, and no forks."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpu import FakeGpu

from chunkc.runtime.pinned import PinnedHome

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
