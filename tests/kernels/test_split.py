"""Split masters: parameter and lower bits are the master to the bit, but for ties; foreign bits do no harm."""

from __future__ import annotations

import adam_cases
import pytest
import torch

from chunkc.kernels import elementwise_cpu, reference
from chunkc.kernels.formats import AdamFormat, Span
from chunkc.kernels.hyperparameters import AdamHyper, scalar_table
from chunkc.kernels.split import join_master, split_master

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UPPER = torch.arange(1 << 16)
"""Every upper half of fp32 bits: both zeros, subnormals, all steps over exponents, infinities, NaN; both signs."""


def masters_with(lower: int) -> torch.Tensor:
    return ((UPPER << 16) + lower).to(torch.int32).view(FP32)


def pattern(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


@pytest.mark.parametrize("lower", [0, 1, 0x7FFE, 0x7FFF, 0x8001, 0xFFFE, 0xFFFF])
def test_masters_come_back_to_the_bit(lower):
    master = masters_with(lower)
    param, kept = split_master(master)
    number = ~master.isnan()
    assert torch.equal(param[number].view(torch.int16), master[number].to(BF16).view(torch.int16))
    joined = join_master(param, kept)
    assert torch.equal(pattern(joined)[number], pattern(master)[number])
    assert joined[~number].isnan().all()
    assert (kept[~number] == 0).all()


def test_a_tie_rounded_down_is_kept_one_place_lower():
    """Of all ties, every second one, away from NaN: where the upper half is even."""
    master = masters_with(0x8000)
    number = ~master.isnan()
    param, kept = split_master(master)
    assert torch.equal(param[number].view(torch.int16), master[number].to(BF16).view(torch.int16))
    moved = (pattern(master) - pattern(join_master(param, kept)))[number]
    assert torch.equal(moved, (UPPER[number] % 2 == 0).to(torch.int32))
    again = split_master(join_master(param, kept))  # and it stays there
    assert torch.equal(again[0][number].view(torch.int16), param[number].view(torch.int16))
    assert torch.equal(again[1], kept)


@pytest.mark.parametrize("lower", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_any_lower_bits_leave_any_parameter_what_it_is(lower):
    """Lower bits of another parameter give a master that rounds to this one; never NaN or infinity from a number."""
    param = UPPER.to(torch.uint16).view(BF16)
    joined = join_master(param, torch.full((1 << 16,), lower).to(torch.uint16).view(torch.int16))
    number = ~param.isnan()
    assert torch.equal(joined.isnan(), ~number)
    # A tie belongs to its even neighbour, and half a place below a power of two is nearer to the next value.
    near = (joined.to(BF16).view(torch.int16).int() - param.view(torch.int16).int()).abs()[number]
    assert near.max() <= (1 if lower == 0x8000 else 0)


@pytest.mark.parametrize("grad_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("decoupled", [True, False])
def test_the_single_run_has_the_reference_s_bits(grad_dtype, decoupled):
    """One span, and every fp16 gradient."""
    every = torch.arange(1 << 16).to(torch.uint16).view(FP16).to(grad_dtype)
    fmt = AdamFormat(BF16, grad_dtype, master=True, split=True)
    expected = adam_cases.make_slots(fmt, 1 << 16, seed=3)
    expected.grad.copy_(every)
    slots = adam_cases.on(expected, "cpu")
    hyper = AdamHyper(lr=1e-2, weight_decay=0.1, step=3, decoupled=decoupled)
    reference.chunk_update(fmt, expected, [Span(0, 1 << 16, 0)], scalar_table([hyper]))
    elementwise_cpu.chunk_update(fmt, slots, [Span(0, 1 << 16, 0)], scalar_table([hyper]))
    assert adam_cases.same_bits(slots, expected)
