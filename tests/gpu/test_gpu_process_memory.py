"""The driver's count of this process beside torch's: what torch reserves, and a context that is about a preset's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from gpu import process_memory as gpu_process_memory

from chunkc.machines.devices import hardware_of
from chunkc.runtime.device.cuda import memory_limit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

MIB = 1 << 20


def test_the_driver_counts_what_torch_reserves_and_a_context() -> None:
    with memory_limit(torch.cuda.memory_reserved() + 512 * MIB):
        held = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        torch.ones(512, 512, device="cuda").mm(torch.ones(512, 512, device="cuda"))  # libraries are loaded
        torch.cuda.synchronize()
        counted, reserved = gpu_process_memory.process_nbytes(os.getpid()), torch.cuda.memory_reserved()
    if counted is None:
        pytest.skip("the driver does not tell what a process holds")
    context, expected = counted - reserved, hardware_of(torch.device("cuda", 0)).context_nbytes
    print(f"\ndriver {counted / MIB:,.0f} MiB, reserved {reserved / MIB:,.0f}, rest {context / MIB:,.0f}, "
          f"planned for {expected / MIB:,.0f}")  # fmt: skip
    assert counted >= reserved >= held.nbytes
    assert context < 4 * expected
