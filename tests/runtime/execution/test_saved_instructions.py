"""Copies of saved values start after the computation that makes them, or that still uses their buffer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from chunkc.runtime.execution.saved import SavedRoom, SavedValues
from chunkc.runtime.execution.saved_instructions import Offload, Reload
from chunkc.runtime.storage.homes import MemoryHome


class EarlyLink:
    """Runs a copy as early as it may be: at once, after what it comes after."""

    def submit(self, job: Callable[[], None], *, after: Sequence[Any] = ()) -> None:
        for mark in after:
            mark.wait()
        job()


def run_behind(computation: Callable[[], object], buffer: torch.Tensor) -> Any:
    """Make a run with one enqueued computation, which runs when its mark is waited for; it allocates `buffer` next."""
    tier = SimpleNamespace(
        links=defaultdict(EarlyLink),
        mark=lambda: [SimpleNamespace(wait=computation)],
        allocate_slot=lambda nbytes, dtype: buffer.view(dtype),
    )
    slots = SimpleNamespace(
        traffic=SimpleNamespace(to_home_nbytes=0, to_device_nbytes=0), drop_spare=lambda: None, debug=False
    )
    return SimpleNamespace(store=SimpleNamespace(tier=tier, slots=slots), saved=SavedValues(SavedRoom(MemoryHome())))


def test_copies_come_after_the_computation_so_far() -> None:
    value = torch.zeros(8)
    run = run_behind(lambda: value.fill_(1), buffer=value)
    registers: list[Any] = [value, None]
    Offload("s", "home", value.nbytes, sources=(0,))(registers, run)
    assert torch.equal(value, torch.ones(8))
    value.zero_()
    run.store.tier.mark = lambda: [SimpleNamespace(wait=lambda: value.fill_(2))]  # the former user of its memory
    Reload("s", "device", value.nbytes, target=1)(registers, run)
    assert torch.equal(registers[1].view(torch.float32), torch.ones(8)), "what was computed is what went home"
    assert run.store.slots.traffic.to_home_nbytes == run.store.slots.traffic.to_device_nbytes == 32
