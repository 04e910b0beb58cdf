"""The suite `prediction` in small form: plans from fakes of either kind beside what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from measuring.small_run import medians, run_small
from peers.subject import phase_peaks
from suites import least_budget, prediction

pytestmark = pytest.mark.timeout(600)


def test_peaks_by_phase():
    moments = [("forward.0", 10, 9), ("forward.1", 30, 31), ("backward.0", 20, None), ("update.0[0:4]", 5, 5)]
    assert phase_peaks(moments) == {"forward": (30, 31), "backward": (20, None), "update": (5, 5)}


def test_ratios_only_where_both_sides_are_there():
    both = prediction.metrics_of(10, 20, 40, 30)
    assert both["measured to plan"].median == 0.75
    assert both["CPU to CUDA fakes"].median == 0.5
    assert set(prediction.metrics_of(None, 20, 40, None)) == {"CUDA fakes", "plan"}


@pytest.mark.slow
def test_a_rehearsal_compares_all_three(tmp_path: Path):
    sections = run_small("prediction", tmp_path)
    assert [section["setting"]["name"] for section in sections] == ["tiny-3", "hf-tiny"]
    for section in sections:
        rows = medians(section)
        assert list(rows) == list(prediction.PHASES)
        for phase, row in rows.items():
            if phase == "update" and section["setting"]["name"] == "hf-tiny":
                assert set(row) == {"note"}  # all of it fits: updates are of no plan
                continue
            # On a CPU, compiled eagerly: to the byte, but for the loss's own gradient and a buffer that no graph reads.
            assert abs(row["measured"] - row["plan"]) <= 64, phase
            assert row["plan"] == row["CPU fakes"], phase
            assert row["CPU to CUDA fakes"] == row["CPU fakes"] / row["CUDA fakes"]


def test_the_gpu_is_known_by_the_driver_s_name(monkeypatch: pytest.MonkeyPatch):
    found = {"gpu": "NVIDIA H200", "gpu_memory_nbytes": 140 << 30}
    monkeypatch.setattr(least_budget.machine, "hardware", lambda: found)
    gpu = least_budget.hardware_here("cuda")
    assert (gpu.name, gpu.device_memory_nbytes) == ("h200", 140 << 30)
