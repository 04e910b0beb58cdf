"""SGD's kernels: `torch.optim.SGD`'s update. That all agree to the bit is in `test_rules`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from chunkc.kernels import elementwise_cpu, reference
from chunkc.kernels.formats import Slots, Span, UpdateFormat
from chunkc.kernels.hyperparameters import scalar_table
from chunkc.kernels.sgd import MomentumFormat, SgdFormat, SgdHyper

FP32 = torch.float32
FORMATS: dict[str, UpdateFormat] = {"plain": SgdFormat(FP32, FP32), "fp32": MomentumFormat(FP32, FP32)}
HYPERS = [
    SgdHyper(lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1, step=3),
    SgdHyper(lr=3e-3, momentum=0.8, nesterov=True, weight_decay=0.2, step=1, maximize=True),
    SgdHyper(lr=1e-3, step=7),
]
NUM_ELEMENTS = 4000
Update = Callable[..., None]


def make_slots(fmt: UpdateFormat, seed: int = 0) -> Slots:
    """Slots as some step leaves them: all about 1."""
    param, grad, buffer = torch.randn(3, NUM_ELEMENTS, generator=torch.Generator().manual_seed(seed))
    return fmt.slots.of({"param": param, "grad": grad, **dict.fromkeys(fmt.kinds, buffer)})


def bits(slots: Slots) -> dict[str, Tensor]:
    found = {"param": slots.param, **slots.states()}
    return {k: t.cpu().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.itemsize]) for k, t in found.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.4, "maximize": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("update", [reference.chunk_update, elementwise_cpu.chunk_update], ids=["reference", "cpu"])
def test_a_hundred_steps_follow_torch(settings: dict[str, Any], update: Update) -> None:
    fmt = FORMATS["fp32" if "momentum" in settings else "plain"]
    slots = make_slots(fmt)
    for state in slots.states().values():
        state.zero_()
    theirs = torch.nn.Parameter(slots.param.clone())
    optimizer = torch.optim.SGD([theirs], lr=1e-2, foreach=False, **settings)
    for step in range(1, 101):
        slots.grad.copy_(make_slots(fmt, seed=step).grad)
        theirs.grad = slots.grad.clone()
        optimizer.step()
        table = scalar_table([SgdHyper(lr=1e-2, step=step, **settings)])
        update(fmt, slots, [Span(0, NUM_ELEMENTS, 0)], table)
        torch.testing.assert_close(slots.param, theirs.detach(), rtol=1e-6, atol=1e-6)


def test_without_momentum_both_formats_have_the_same_bits() -> None:
    """So a parameter's bits do not depend on whether its chunk has room for a buffer; and the buffer stays as it is."""
    plain, other = make_slots(FORMATS["plain"]), make_slots(FORMATS["fp32"])
    before = other.states()["momentum_buffer"].clone()
    for update, fmt, slots in (
        (reference.chunk_update, FORMATS["plain"], plain),
        (elementwise_cpu.chunk_update, FORMATS["fp32"], other),
    ):
        update(fmt, slots, [Span(0, NUM_ELEMENTS, 0)], scalar_table(HYPERS[2:]))
    assert torch.equal(bits(plain)["param"], bits(other)["param"])
    assert torch.equal(other.states()["momentum_buffer"], before)
