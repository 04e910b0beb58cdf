"""The reference in any format, against `torch.optim` and against what low precision is for: training all the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import adam_cases
import pytest
import torch

from chunkc.kernels import reference
from chunkc.kernels.formats import AdamFormat, AdamSlots, GradScale, Span, num_quant_blocks, rounding_key
from chunkc.kernels.hyperparameters import AdamHyper, scalar_table
from chunkc.kernels.split import split_master

FORMATS = adam_cases.FORMATS
SCALARS = scalar_table(adam_cases.HYPERS)


def key_of(fmt: AdamFormat, step: int = 1, seed: int = 0):
    return rounding_key(seed, step, 0) if fmt.stochastic else None


def update(fmt: AdamFormat, slots: AdamSlots, **options: object) -> AdamSlots:
    reference.chunk_update(fmt, slots, [Span(0, slots.param.numel(), 0)], SCALARS, **{"key": key_of(fmt), **options})
    return slots


@pytest.mark.parametrize("settings", [{}, {"maximize": True, "betas": (0.4, 0.9)}, {"betas": (0.0, 0.99)}], ids=str)
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("name", ["fp32", "bf16-master", "bf16-master-from-fp32", "bf16-split", "fp16-master"])
def test_follows_torch(name: str, decoupled: bool, settings: dict[str, Any]) -> None:
    """A hundred steps, in which learning rate and weight decay change."""
    fmt, scale = FORMATS[name], GradScale(torch.tensor(0.25), torch.tensor(2.0))
    slots = adam_cases.make_slots(fmt, 1003)
    slots.exp_avg.zero_()
    slots.exp_avg_sq.zero_()
    theirs = torch.nn.Parameter(adam_cases.target_of(fmt, slots).clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([theirs], foreach=False, **settings)
    beta1, beta2 = optimizer.param_groups[0]["betas"]
    for step in range(1, 101):
        lr, weight_decay = 1e-4 * (1 + step % 7), 0.1 * (step % 3)
        optimizer.param_groups[0].update(lr=lr, weight_decay=weight_decay)
        slots.grad.copy_(adam_cases.make_slots(fmt, 1003, seed=step).grad)
        theirs.grad = slots.grad.float() * 0.5
        optimizer.step()
        maximize = settings.get("maximize", False)
        hyper = AdamHyper(lr, beta1, beta2, 1e-8, weight_decay, step, decoupled=decoupled, maximize=maximize)
        reference.chunk_update(fmt, slots, [Span(0, 1003, 0)], scalar_table([hyper]), scale=scale)
        assert torch.equal(slots.param, adam_cases.target_of(fmt, slots).to(fmt.param_dtype))
    state = optimizer.state[theirs]
    torch.testing.assert_close(adam_cases.target_of(fmt, slots), theirs.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(slots.exp_avg, state["exp_avg"], rtol=0, atol=1e-6)
    torch.testing.assert_close(slots.exp_avg_sq, state["exp_avg_sq"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.stochastic])
def test_stochastic_rounding_is_reproducible(name: str) -> None:
    fmt = FORMATS[name]
    first, again = (update(fmt, adam_cases.make_slots(fmt, 5000)) for _ in range(2))
    assert adam_cases.same_bits(first, again)
    for other in ({"key": key_of(fmt, step=2)}, {"key": key_of(fmt, seed=1)}, {"first_element": 256}):
        assert not adam_cases.same_bits(first, update(fmt, adam_cases.make_slots(fmt, 5000), **other))


def test_small_updates_add_up() -> None:
    """A thousandth of bf16's step each time: stochastic rounding gets there, rounding to nearest would stay."""
    fmt = FORMATS["bf16-only-fp32-moments"]
    slots = adam_cases.make_slots(fmt, 4096)
    for tensor, value in ((slots.param, 1.0), (slots.grad, 1.0), (slots.exp_avg, 0.0), (slots.exp_avg_sq, 0.0)):
        tensor.fill_(value)
    for step in range(1, 201):
        scalars = scalar_table([AdamHyper(lr=1e-5, step=step)])
        reference.chunk_update(fmt, slots, [Span(0, 4096, 0)], scalars, key=key_of(fmt, step))
    assert torch.tensor(1.0 - 1e-5).bfloat16() == 1.0
    assert slots.param.double().mean().item() == pytest.approx(1.0 - 200 * 1e-5, abs=2e-4)


@pytest.mark.parametrize(
    "name", ["fp32-int8-moments", "bf16-master-bf16-moments", "bf16-split", "bf16-only", "bf16-only-int8-moments"]
)
def test_trains_about_as_well_as_fp32(name: str) -> None:
    """A small regression: the loss reached is within a fiftieth of the fall that fp32 gets."""
    losses = {kind: train(FORMATS[kind]) for kind in ("fp32", name)}
    start, reached = losses["fp32"]
    assert reached < 0.1 * start
    assert losses[name][1] < reached + 0.02 * (start - reached)


@cache
def train(fmt: AdamFormat, num_steps: int = 150) -> tuple[float, float]:
    """First and last loss of a network of one hidden layer whose parameters are one chunk."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 16, generator=generator)
    targets = torch.sin(inputs @ torch.randn(16, 4, generator=generator) * 0.5)
    num_elements = 16 * 64 + 64 * 4
    value = torch.randn(num_elements, generator=generator) * 0.2
    blocks = [torch.zeros(num_quant_blocks(num_elements)) if fmt.quantised else None for _ in range(2)]
    moments = [torch.zeros(num_elements, dtype=fmt.moment_dtype) for _ in range(2)]
    grad = torch.zeros(num_elements, dtype=fmt.grad_dtype)
    param, master = split_master(value) if fmt.split else (value.to(fmt.param_dtype), value.clone())
    slots = AdamSlots(param, grad, *moments, master if fmt.master else None, *blocks)
    losses = []
    for step in range(1, num_steps + 1):
        weights = slots.param.to(torch.float32, copy=True).requires_grad_()
        hidden = torch.relu(inputs @ weights[: 16 * 64].view(16, 64))
        loss = (hidden @ weights[16 * 64 :].view(64, 4) - targets).square().mean()
        loss.backward()
        slots.grad.copy_(weights.grad)
        losses.append(loss.item())
        scalars = scalar_table([AdamHyper(lr=1e-2, step=step)])
        reference.chunk_update(fmt, slots, [Span(0, num_elements, 0)], scalars, key=key_of(fmt, step))
    return losses[0], losses[-1]
