"""`chunkc.optim.Lion`: the paper's rule, and the same bits under every budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_models import (
    assert_close,
    backward,
    build,
    copy_gradients,
    twin_of,
)

from chunkc.optim import Lion

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@torch.no_grad()
def lion_step(
    parameter: torch.Tensor, mean: torch.Tensor, lr: float, betas: tuple[float, float], weight_decay: float
) -> None:
    """Algorithm 2 of arXiv:2302.06675, as the authors' `lion_pytorch.py` has it."""
    assert parameter.grad is not None
    parameter.mul_(1 - lr * weight_decay)
    update = mean * betas[0] + parameter.grad * (1 - betas[0])
    parameter.add_(update.sign_(), alpha=-lr)
    mean.mul_(betas[1]).add_(parameter.grad, alpha=1 - betas[1])


def test_steps_follow_the_paper() -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.98), "weight_decay": 0.1}
    model, call = build("plain")
    expected = twin_of(model)
    optimizer = Lion(model.parameters(), **settings)
    means = [torch.zeros_like(parameter) for parameter in expected.parameters()]
    for step in range(10):
        backward(call, step)
        copy_gradients(model, expected)
        optimizer.step()
        optimizer.zero_grad()
        for parameter, mean in zip(expected.parameters(), means, strict=True):
            lion_step(parameter, mean, **settings)
    assert_close(model, expected)
    for parameter, mean in zip(model.parameters(), means, strict=True):
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], mean)
