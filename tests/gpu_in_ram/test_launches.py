"""What stays on the device is updated in few launches, whatever the number of parameters: one, or of LAMB one for each
stage and one for the totals between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda_in_ram
import pytest
import torch
from device_gpt import GPT, SMALL

import chunkc

OPTIMIZERS: dict[str, tuple[torch.dtype, Callable[[Any], torch.optim.Optimizer], int]] = {
    "AdamW": (torch.bfloat16, chunkc.optim.AdamW, 1),
    "8-bit moments": (torch.bfloat16, lambda p: chunkc.optim.AdamW(p, moments_dtype="int8"), 1),
    "rounded stochastically": (torch.bfloat16, lambda p: chunkc.optim.AdamW(p, stochastic_rounding=True), 1),
    "SGD": (torch.float32, lambda p: chunkc.optim.SGD(p, momentum=0.9), 1),
    "LAMB": (torch.bfloat16, chunkc.optim.LAMB, 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_of_residents_takes_few_launches(name: str) -> None:
    dtype, make, num_wanted = OPTIMIZERS[name]
    model = chunkc.place(GPT(**SMALL).to(dtype), device="cuda")
    compiled = torch.compile(model, backend="chunkc", options={"memory_budget": 1 << 30, "codegen": "eager"})
    optimizer, num_launches = make(model.parameters()), 0
    for _ in range(3):
        compiled(torch.zeros(2, 32, dtype=torch.int64, device="cuda")).backward()
        before = cuda_in_ram.num_launches()
        optimizer.step()
        num_launches = cuda_in_ram.num_launches() - before
        optimizer.zero_grad()
    assert len(list(model.parameters())) == 41
    assert num_launches == num_wanted
