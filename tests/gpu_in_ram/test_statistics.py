"""What a user reads from torch while chunkc measures the moments of every step. No arithmetic."""

from __future__ import annotations

import torch
from device_gpt import SMALL, train

HUGE = 1 << 34
MIB = 1 << 20


def test_a_user_s_peaks_are_since_his_own_last_reset() -> None:
    torch.cuda.init()
    torch.cuda.reset_peak_memory_stats()
    report = train(SMALL, torch.float32, HUGE).report
    assert torch.cuda.max_memory_allocated() == report.measured_peak_nbytes
    larger = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    allocated = torch.cuda.memory_allocated()
    del larger
    again = train(SMALL, torch.float32, HUGE).report
    assert again.measured_peak_nbytes is not None
    assert again.measured_peak_nbytes < allocated
    assert torch.cuda.max_memory_allocated() == torch.accelerator.max_memory_allocated() == allocated
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] == allocated
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    train(SMALL, torch.float32, HUGE)
    torch.accelerator.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
