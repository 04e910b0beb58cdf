"""A default device, as `torch.device(...)` around a step or `torch.set_default_device` set it, is for the user's own
tensors: what chunkc makes is where it has to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import array, differences, take_step, weights
from optim_models import BUDGET_NBYTES, batch, build

import chunkc

BATCHES = [batch(step) for step in range(3)]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: chunkc.optim.AdamW(parameters, lr=1e-2),
    "int8": lambda parameters: chunkc.optim.AdamW(parameters, lr=1e-2, moments_dtype="int8"),
    "lamb": lambda parameters: chunkc.optim.LAMB(parameters, lr=1e-2),
    "torch": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def trained(optimizer_name: str, default: str, home: str) -> list[Any]:
    """Losses, and the weights at the end, of two steps, a state saved and loaded again, and a third step."""
    torch._dynamo.reset()
    model, call = build("adopted", home=home, memory_budget=BUDGET_NBYTES)
    losses = []
    with torch.device(default):
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        for step, x in enumerate(BATCHES):
            loss = call(x)
            take_step(loss, optimizer)
            losses.append(array(loss))
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
                model.load_state_dict(model.state_dict())
    return [losses, weights(model)]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("optimizer_name", "home"), [("adamw", "cpu"), ("int8", "disk"), ("lamb", "cpu"), ("torch", "disk")]
)
def test_a_default_device_changes_nothing(optimizer_name: str, home: str, tmp_path: Path) -> None:
    if home == "disk":
        home = f"disk:{tmp_path}"
    expected = trained(optimizer_name, "cpu", home)
    assert not differences(trained(optimizer_name, "meta", home), expected)
