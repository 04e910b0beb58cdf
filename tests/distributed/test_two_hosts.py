"""Ranks on two hosts with a slow link between them, which are network namespaces of this machine; see `two_hosts`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount"]


def can_make_hosts() -> bool:
    command = [*UNSHARE, "ip", "link", "add", "eth0", "type", "veth"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="no network namespaces for this user, or no `ip`")
def test_less_goes_over_the_slow_link_than_over_the_fast_one(tmp_path: Path) -> None:
    """With parts cut inside of a host, and copies between hosts: a third of what a cut over all ranks sends there."""
    program = str(Path(__file__).with_name("two_hosts.py"))
    subprocess.run([*UNSHARE, sys.executable, "-P", program, str(tmp_path)], check=True, timeout=400)
    for rank in range(4):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["host"] == ("near", "far")[rank // 2]
        assert all(found[shape]["difference"] < 1e-6 for shape in ("(2, 2)", "(4,)"))
        copied, cut = found["(2, 2)"], found["(4,)"]
        assert copied["eth0"] == pytest.approx(1, rel=0.05), "each rank half of the sums of its part, and the totals"
        assert copied["eth0"] < 0.5 * copied["lo"]
        assert copied["eth0"] < 0.5 * cut["eth0"]
