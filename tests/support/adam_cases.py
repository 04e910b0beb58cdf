"""Formats of Adam, slots to update, and whether two have the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TypeVar

import torch
from torch import Tensor

from chunkc.kernels.formats import AdamFormat, AdamSlots, GradScale, RoundingKey, Slots, num_quant_blocks, rounding_key
from chunkc.kernels.hyperparameters import AdamHyper
from chunkc.kernels.split import join_master, split_master

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FORMATS = {
    "fp32": AdamFormat(FP32, FP32),
    "fp32-from-bf16": AdamFormat(FP32, BF16),
    "fp32-bf16-moments": AdamFormat(FP32, FP32, "bfloat16"),
    "fp32-bf16-moments-stochastic": AdamFormat(FP32, FP16, "bfloat16", rounding="stochastic"),
    "fp32-int8-moments": AdamFormat(FP32, FP32, "int8"),
    "bf16-master": AdamFormat(BF16, BF16, master=True),
    "bf16-master-from-fp32": AdamFormat(BF16, FP32, master=True),
    "bf16-master-stochastic": AdamFormat(BF16, BF16, master=True, rounding="stochastic"),
    "bf16-master-bf16-moments": AdamFormat(BF16, BF16, "bfloat16", master=True),
    "bf16-master-int8-moments": AdamFormat(BF16, BF16, "int8", master=True),
    "bf16-split": AdamFormat(BF16, BF16, master=True, split=True),
    "bf16-split-from-fp32": AdamFormat(BF16, FP32, master=True, split=True),
    "bf16-split-from-fp16": AdamFormat(BF16, FP16, master=True, split=True),
    "bf16-split-bf16-moments": AdamFormat(BF16, BF16, "bfloat16", master=True, split=True),
    "bf16-only": AdamFormat(BF16, BF16, "bfloat16", rounding="stochastic"),
    "bf16-only-fp32-moments": AdamFormat(BF16, BF16, rounding="stochastic"),
    "bf16-only-int8-moments": AdamFormat(BF16, BF16, "int8", rounding="stochastic"),
    "fp16-master": AdamFormat(FP16, FP16, master=True),
    "fp16-master-bf16-moments": AdamFormat(FP16, FP16, "bfloat16", master=True),
}
HYPERS = [
    AdamHyper(lr=1e-2, weight_decay=0.1, step=3),
    AdamHyper(lr=3e-3, beta1=0.4, weight_decay=0.2, step=1, decoupled=False, maximize=True),
    AdamHyper(lr=1e-3, beta2=0.95, eps=1e-6, step=7),
]
ROUNDED = ("bf16-master", "bf16-split", "bf16-master-stochastic", "fp16-master")
"""Formats with masters that are rounded in every way."""
SCALE = GradScale(torch.tensor(0.5), torch.tensor(0.7), torch.tensor(0.0))
AnySlots = TypeVar("AnySlots", bound=Slots)


def make_slots(fmt: AdamFormat, num_elements: int, seed: int = 0) -> AdamSlots:
    """Make slots as some step leaves them: parameter and gradient about 1, moments about 0.1, or zeros if 8-bit."""
    generator = torch.Generator().manual_seed(seed)
    value, grad, exp_avg, exp_avg_sq = torch.randn(4, num_elements, generator=generator)
    moments = [exp_avg.mul(0.1).to(fmt.moment_dtype), exp_avg_sq.square().mul(0.1).to(fmt.moment_dtype)]
    scales: list[Tensor | None] = [None, None]
    if fmt.quantised:
        moments = [torch.zeros_like(moment) for moment in moments]
        scales = [torch.zeros(num_quant_blocks(num_elements)) for _ in moments]
    master = value.clone() if fmt.master else None
    if fmt.split:
        value, master = split_master(value)
    return AdamSlots(value.to(fmt.param_dtype), grad.to(fmt.grad_dtype), *moments, master, *scales)


def on(slots: AdamSlots, device: str) -> AdamSlots:
    """Return a copy on a device."""
    return AdamSlots(*[None if t is None else t.to(device, copy=True) for t in tensors(slots)])


def target_of(fmt: AdamFormat, slots: AdamSlots) -> Tensor:
    """Return the weights that an update changes, in fp32: the parameter, or its master."""
    if slots.master is None:
        return slots.param
    return join_master(slots.param, slots.master) if fmt.split else slots.master


def tensors(slots: Slots) -> list[Tensor | None]:
    return [getattr(slots, field.name) for field in fields(slots)]


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same_bits(slots: AdamSlots, other: AdamSlots) -> bool:
    """Whether all tensors are equal to the bit, but for NaNs: a device may choose their bit pattern."""
    pairs = list(zip(tensors(slots), tensors(other)))
    assert all((a is None) == (b is None) for a, b in pairs)
    return all(same_values(a.cpu(), b.cpu()) for a, b in pairs if a is not None and b is not None)


def assert_same_bits(slots: AdamSlots, other: AdamSlots) -> None:
    assert same_bits(slots, other)


def same_values(tensor: Tensor, other: Tensor) -> bool:
    nan = tensor.isnan() if tensor.is_floating_point() else torch.zeros_like(tensor, dtype=torch.bool)
    return torch.equal(nan, other.isnan() if other.is_floating_point() else nan) and torch.equal(
        bits(tensor)[~nan], bits(other)[~nan]
    )


def with_special_values(slots: AnySlots) -> AnySlots:
    """Put infinities, NaN, signed zeros, subnormals and rounding ties at several places of every tensor."""
    infinity = float("inf")
    special = torch.tensor([infinity - infinity, infinity, -infinity, 0, -0.0, 1e-40, 1 + 2**-8, 1 + 3 * 2**-8])
    for shift, tensor in enumerate(tensors(slots)):
        if tensor is not None and tensor.is_floating_point() and tensor.numel() > 100:
            for start in range(shift, tensor.numel() - len(special), 371):
                tensor[start : start + len(special)] = special.to(tensor.dtype)
    return slots


def key_of(fmt: AdamFormat, step: int = 1) -> RoundingKey | None:
    return rounding_key(seed=9, step=step, chunk=4) if fmt.stochastic else None


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Compute with so many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
