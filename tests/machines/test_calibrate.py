"""Calibration in small: figures of the right order, the user's settings left alone, clear errors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkc.ir.errors import ChunkcError, HomeError, UnsupportedError
from chunkc.ir.hardware import Hardware
from chunkc.ir.links import host_links
from chunkc.machines import calibrate as module
from chunkc.machines import measuring
from chunkc.machines.calibrate import Sizes, calibrate
from chunkc.machines.presets import load_hardware, save_hardware

MIB = 1 << 20
TINY = Sizes(
    matrix=128,
    memory_nbytes=MIB,
    link_nbytes=MIB,
    update_numel=1 << 16,
    disk_nbytes=MIB,
    repeats=2,
    share_s=0.05,
    enough_s=0.001,
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Hardware, list[tuple[str, int, int]], Path]:
    shown: list[tuple[str, int, int]] = []
    folder = tmp_path_factory.mktemp("disk")
    hardware = calibrate(device="cpu", directory=folder, sizes=TINY, show=lambda *step: shown.append(step))
    return hardware, shown, folder


def test_everything_is_measured_and_plausible(measured: tuple) -> None:
    hardware = measured[0]
    assert hardware.kind == "cpu"
    assert hardware.num_devices == 1
    assert hardware.context_nbytes == 0
    rates = {key: value for key, value in vars(hardware).items() if key.endswith("_per_s")}
    assert rates.pop("tf32_flops_per_s") is None
    rates |= {link.name: link.bytes_per_s for link in hardware.links}
    assert len(rates) == 11
    for key, rate in rates.items():  # Hardware itself refuses what is not positive and finite
        low, high = (1e7, 1e15) if "flops" in key else (1e6, 1e13)
        assert low < rate < high, key
    assert hardware.flops_per_s == hardware.fp32_flops_per_s
    assert 1 << 28 < hardware.device_memory_nbytes < 1 << 50
    assert hardware.device_memory_nbytes == hardware.host_memory_nbytes
    assert torch.__version__ in hardware.source


def test_progress_goes_from_none_to_all(measured: tuple) -> None:
    shown = measured[1]
    assert [done for _, done, _ in shown] == list(range(len(shown)))
    assert {of for _, _, of in shown} == {len(shown) - 1}
    assert shown[-1][0] == "done"
    assert len({what for what, _, _ in shown}) == len(shown)


def test_nothing_is_left_behind(measured: tuple) -> None:
    assert not list(measured[2].iterdir())


def test_what_was_measured_is_saved_and_loaded(measured: tuple, tmp_path: Path) -> None:
    path = tmp_path / "chunkc" / "hardware.json"
    save_hardware(measured[0], path)
    assert load_hardware(str(path)) == measured[0]


def test_a_median_repeats_within_its_share() -> None:
    calls: list[float] = []
    seconds = measuring.median_s(lambda: calls.append(time.sleep(0.002) or 0.0), Sizes(repeats=4, share_s=10))
    assert len(calls) == 5
    assert 0.002 <= seconds < 0.1
    calls.clear()
    measuring.median_s(lambda: calls.append(time.sleep(0.02) or 0.0), Sizes(repeats=100, share_s=0.05))
    assert 2 <= len(calls) <= 4
    calls.clear()
    measuring.median_s(lambda: calls.append(time.sleep(0.02) or 0.0), Sizes(repeats=100, share_s=0))
    assert len(calls) == 2


def test_matrices_grow_until_they_take_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    edges: list[int] = []
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: (edges.append(a.shape[0]), real(a, b, out=out))[1])
    cpu = torch.device("cpu")
    module._matrix_flops_per_s(cpu, torch.float32, Sizes(matrix=1024, enough_s=1e9, repeats=1))
    assert max(edges) == 1024
    edges.clear()
    module._matrix_flops_per_s(cpu, torch.float32, Sizes(matrix=1024, enough_s=0, repeats=1))
    assert set(edges) == {256}


def test_the_share_of_a_slow_link_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep in the copy home must show in its rate and in the rate of both, and nowhere else."""
    real = module.DiskHome.write

    def slow(*args: object) -> None:
        time.sleep(0.05)
        real(*args)

    monkeypatch.setattr(module.DiskHome, "write", slow)
    with module._copies(torch.device("cpu"), str(tmp_path), TINY) as (inwards, outwards):
        both = measuring.together_s(inwards, outwards, TINY)
        assert measuring.alone_s(outwards, TINY) >= 0.05
        assert both >= 0.05
        assert measuring.alone_s(inwards, TINY) < 0.05


def test_no_thread_starts_inside_a_sample_of_both_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And both copies are under way at once: each waits for the other to have begun."""
    rendezvous = threading.Barrier(2)
    for name in ("read", "write"):
        monkeypatch.setattr(module.DiskHome, name, lambda *args: rendezvous.wait(10))
    started: list[threading.Thread] = []
    real = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), real(thread))[1])
    with monkeypatch.context() as early:
        early.setattr(module.DiskHome, "write", lambda *args: None)  # as buffers are filled
        copies = module._copies(torch.device("cpu"), str(tmp_path), TINY)
        inwards, outwards = copies.__enter__()
    samples: list[int] = []

    def sample() -> None:
        before = len(started)
        for wait in [start() for start in (inwards, outwards)]:
            wait()
        samples.append(len(started) - before)

    sample()  # as `median_s` does, which does not count it
    measuring.median_s(sample, Sizes(repeats=3, share_s=5))
    copies.__exit__(None, None, None)
    assert samples[1:] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("to_device", "to_home", "slowdown"), [(50.0, 50.0, 0.7), (50.0, 30.0, 0.8), (10.0, 40.0, 1.0)]
)
def test_both_links_are_measured_as_they_are_simulated(to_device: float, to_home: float, slowdown: float) -> None:
    """The slower copy goes on alone at its full rate: seconds of that are not those of both."""
    both = slowdown * (to_device + to_home)
    hardware = Hardware(1.0, 1.0, host_links(to_device, to_home), both_links_bytes_per_s=both)
    seconds = hardware.link_seconds({"to_device": 120, "to_home": 120})
    found = measuring.both_links_bytes_per_s(120, 120 / to_device, 120 / to_home, seconds)
    assert found == pytest.approx(both)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_either_side_is_raised(failing: int) -> None:
    def fail() -> None:
        raise HomeError("no space")

    waits = [lambda: None, lambda: None]
    waits[failing] = fail
    with pytest.raises(HomeError, match="no space"):
        measuring.together_s(*(lambda wait=wait: wait for wait in waits), TINY)


def test_the_users_matmul_setting_comes_back() -> None:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    try:
        settings.fp32_precision = "tf32"
        with module._tf32(False):
            assert settings.fp32_precision == "ieee"
        assert settings.fp32_precision == "tf32"
        with pytest.raises(KeyError), module._tf32(True):
            raise KeyError
        assert settings.fp32_precision == "tf32"
    finally:
        settings.fp32_precision = before


def test_the_disk_is_read_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the home's own reads: what is planned with is what training gets."""
    steps: list[str] = []
    for name in ("read", "write", "write_out"):
        real = getattr(module.DiskHome, name)

        def noted(*args: Any, name: str = name, real: Callable[..., None] = real, **options: Any) -> None:
            steps.append("forget" if options.get("forget") else name)
            real(*args, **options)

        monkeypatch.setattr(module.DiskHome, name, noted)
    module._disk_bytes_per_s(str(tmp_path), TINY)
    assert steps[:2] == ["write", "write_out"]
    assert steps.count("forget") == steps.count("read") > 1
    for index, step in enumerate(steps):
        if step == "read":
            assert steps[index - 1] == "forget"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(ChunkcError, match="missing"):
        calibrate(device="cpu", directory=missing, sizes=TINY)
    with pytest.raises(ChunkcError, match="cannot measure the disk"):
        module._disk_bytes_per_s(missing, TINY)


@pytest.mark.parametrize("device", ["meta", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_cannot_be_measured(device: str) -> None:
    with pytest.raises(UnsupportedError, match=f"cannot measure '{device}'"):
        calibrate(device=device, sizes=TINY)


@pytest.mark.slow
def test_without_a_compiler(tmp_path: Path) -> None:
    script = (
        "from chunkc.machines.calibrate import *\n"
        "from chunkc.machines.calibrate import _update_bytes_per_s as f\n"
        "f(Sizes(repeats=1))"
    )
    environment = os.environ | {"CXX": str(tmp_path / "g++"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-P", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "UnsupportedError: updates on the CPU cannot be compiled: install a C++ compiler" in done.stderr


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device() -> None:
    hardware = calibrate(device="cuda", sizes=Sizes(repeats=2, share_s=0.2))
    assert hardware.kind == "cuda"
    assert hardware.link("to_device").bytes_per_s < hardware.memory_bytes_per_s
    assert hardware.fp32_flops_per_s < hardware.flops_per_s
    assert 0 < hardware.context_nbytes < hardware.device_memory_nbytes
    assert hardware.page_table_nbytes_per_gib is not None


@pytest.mark.slow
def test_the_whole_takes_less_than_half_a_minute(tmp_path: Path) -> None:
    start = time.perf_counter()
    calibrate(device="cpu", directory=tmp_path)
    assert time.perf_counter() - start < 30
