"""`torchrun --max-restarts` goes on from the last checkpoint, on as many ranks and on fewer; see `restarted`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("restarted.py")
LAUNCHER = [sys.executable, "-m", "torch.distributed.run"]
TIMEOUT_S = 500


def launched(*words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*LAUNCHER, *words], env=environment, text=True, stderr=subprocess.PIPE)


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def found_in(folder: Path, launcher: subprocess.Popen[str]) -> dict[str, Any]:
    _, told = launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == 0, told[-2000:]
    return json.loads((folder / "found.json").read_text())


def on_one_host(folder: Path, num_ranks: int, how: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    words = ["--standalone", "--nproc-per-node", str(num_ranks), "--max-restarts", "2", str(SCRIPT), str(folder), how]
    return found_in(folder, launched(*words))


@pytest.mark.slow
def test_ranks_that_are_started_anew_go_on_with_the_same_bits(tmp_path: Path) -> None:
    whole, restarted = on_one_host(tmp_path / "whole", 2, "no"), on_one_host(tmp_path / "again", 2, "killed")
    assert (whole["begin"], restarted["begin"]) == (0, 3)
    assert restarted["weights"] == whole["weights"]
    assert restarted["losses"] == {step: loss for step, loss in whole["losses"].items() if int(step) >= 3}


@pytest.mark.slow
def test_the_host_that_is_left_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    whole = on_one_host(tmp_path / "whole", 2, "no")
    folder = tmp_path / "again"
    folder.mkdir()
    common = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "test"]
    common += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    # Who comes later than the last call, or says nothing for three intervals, is taken for gone: not on a busy machine.
    settings = "last_call_timeout=45,keep_alive_interval=5,keep_alive_max_attempt=3,join_timeout=240,is_host="
    hosts = [
        launched(*common, "--rdzv-conf", f"{settings}{is_host}", str(SCRIPT), str(folder), how)
        for is_host, how in ((1, "no"), (0, "gone"))
    ]
    restarted = found_in(folder, hosts[0])
    hosts[1].communicate(timeout=TIMEOUT_S)
    assert (restarted["begin"], restarted["ranks"], hosts[1].returncode) == (3, 1, -9)
    for step in ("3", "4"):
        assert restarted["losses"][step] == pytest.approx(whole["losses"][step], abs=1e-6)
