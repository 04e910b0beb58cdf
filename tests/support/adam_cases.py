"""Slots to update, and checks of the CPU's and the Triton kernel, as cases that run on any device.

Triton's cases run in a process of their own where Triton is interpreted (`interpreting`). Every case computes what it
expects by the reference, on the CPU: a device has no say in an update's bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from chunkc.kernels import elementwise_cpu, elementwise_triton, reference
from chunkc.kernels.formats import (
    NO_SCALE,
    AdamFormat,
    AdamSlots,
    GradScale,
    RoundingKey,
    Slots,
    Span,
    num_quant_blocks,
    rounding_key,
)
from chunkc.kernels.hyperparameters import AdamHyper, scalar_table
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
Update = Callable[..., None]
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


def triton_update(fmt: AdamFormat, slots: AdamSlots, spans: list[Span], scalars: Tensor, **options: object) -> None:
    """Call the kernel with the signature of the reference."""
    device = slots.param.device
    elementwise_triton.update(
        fmt, slots, elementwise_triton.work_table(spans, fmt).to(device), scalars.to(device), **options
    )


@dataclass(frozen=True)
class Kernel:
    """A kernel with the signature of the reference, and the hyperparameters and scale that its cases have."""

    update: Update
    device: str
    hypers: list[AdamHyper]
    scale: GradScale


def by_triton(device: str) -> Kernel:
    return Kernel(triton_update, device, HYPERS, NO_SCALE)


SCALE = GradScale(torch.tensor(0.5), torch.tensor(0.7), torch.tensor(0.0))
BY_CPU = Kernel(elementwise_cpu.chunk_update, "cpu", [HYPERS[0], HYPERS[2], HYPERS[2]], SCALE)
"""One compiled pass for all cases of a format: L2 and updates without a scale have others."""


def key_of(fmt: AdamFormat, step: int = 1) -> RoundingKey | None:
    return rounding_key(seed=9, step=step, chunk=4) if fmt.stochastic else None


def check_agrees(kernel: Kernel, name: str) -> None:
    """Check that each of three steps has the reference's bits.

    There are several groups, ragged spans, gaps, special values and scales; the 32 lower bits of an index wrap in the
    last step.
    """
    fmt, scalars = FORMATS[name], scalar_table(kernel.hypers)
    align = fmt.span_alignment
    expected = with_special_values(make_slots(fmt, 4000, seed=1))
    slots = on(expected, kernel.device)
    spans = [Span(0, 203, 0), Span(3 * align if align > 1 else 205, 1040, 1), Span(1280, 3583, 2), Span(3584, 4000, 0)]
    for step, first_element in ((1, 0), (2, 5 << 32), (3, (1 << 32) - 2048)):
        options = {"key": key_of(fmt, step), "first_element": first_element}
        reference.chunk_update(fmt, expected, spans, scalars, scale=SCALE, **options)
        there = GradScale(*[t.to(kernel.device) for t in (SCALE.unscale, SCALE.clip, SCALE.found_inf)])
        kernel.update(fmt, slots, spans, scalars, scale=there, **options)
        assert same_bits(slots, expected), f"step {step}"
    assert not same_bits(slots, make_slots(fmt, 4000, seed=1))


def check_found_inf(kernel: Kernel, name: str) -> None:
    """Check that nothing changes where found_inf is not 0, NaN included; all changes where it is."""
    fmt = FORMATS[name]
    slots = on(make_slots(fmt, 1000), kernel.device)
    before = on(slots, "cpu")
    for found_inf in (1.0, float("inf"), float("nan"), 0.0):
        scale = replace(kernel.scale, found_inf=torch.tensor(found_inf, device=kernel.device))
        kernel.update(fmt, slots, [Span(0, 1000, 0)], scalar_table(kernel.hypers), scale=scale, key=key_of(fmt))
        assert same_bits(slots, before) == (found_inf != 0), found_inf


def check_cut(kernel: Kernel, name: str) -> None:
    """Check that a chunk has the same bits, updated at once, in tiles and in several spans."""
    fmt, scalars = FORMATS[name], scalar_table(kernel.hypers)
    whole = on(with_special_values(make_slots(fmt, 5000)), kernel.device)
    tiles, again = on(whole, kernel.device), on(whole, kernel.device)
    options = {"scale": kernel.scale, "key": key_of(fmt)}
    kernel.update(fmt, whole, [Span(0, 5000, 2)], scalars, **options)
    cuts = [0, 512, 768, 3328, 5000] if fmt.quantised else [0, 1, 18, 500, 1536, 3001, 5000]
    for begin, end in itertools.pairwise(cuts):
        kernel.update(fmt, tiles.part(begin, end), [Span(0, end - begin, 2)], scalars, first_element=begin, **options)
    kernel.update(fmt, again, [Span(0, 1280, 2), Span(1280, 5000, 2)], scalars, **options)
    assert same_bits(whole, tiles)
    assert same_bits(whole, again)


def check_gradient_in_parameter(kernel: Kernel, name: str) -> None:
    """Check an update with the gradient in the parameter's own memory."""
    fmt = FORMATS[name]
    apart = on(make_slots(fmt, 3000), kernel.device)
    apart.param.copy_(apart.grad) if fmt.master else apart.grad.copy_(apart.param)
    shared = on(apart, kernel.device)
    shared = replace(shared, grad=shared.param)
    for slots in (apart, shared):
        options = {"scale": kernel.scale, "key": key_of(fmt)}
        kernel.update(fmt, slots, [Span(0, 3000, 0)], scalar_table(kernel.hypers), **options)
    assert same_bits(shared, replace(apart, grad=apart.param))


def check_every_rounding(kernel: Kernel, name: str) -> None:
    """Check that parameters are the masters' rounding, with lr = 0 and no decay.

    Masters have a third of all upper halves, each with critical lower halves.
    """
    fmt = FORMATS[name]
    lower = torch.tensor([0, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    master = ((torch.arange(0, 1 << 16, 3).unsqueeze(1) << 16) + lower).flatten().to(torch.int32).view(FP32)
    zeros = torch.zeros_like(master)
    param, kept = split_master(master) if fmt.split else (zeros.to(fmt.param_dtype), master)
    expected = AdamSlots(param, zeros.to(fmt.grad_dtype), zeros.clone(), zeros.clone(), kept.clone())
    slots = on(expected, kernel.device)
    for update, each in ((reference.chunk_update, expected), (kernel.update, slots)):
        update(fmt, each, [Span(0, len(master), 0)], scalar_table([AdamHyper(lr=0.0)]), key=key_of(fmt))
    number = ~expected.param.isnan()
    assert torch.equal(slots.param.cpu().isnan(), ~number)
    assert torch.equal(bits(slots.param)[number], bits(expected.param)[number])
    if not fmt.stochastic:
        assert torch.equal(bits(slots.param)[number], bits(master.to(fmt.param_dtype))[number])
    if fmt.split:
        assert torch.equal(bits(slots.master), bits(kept))


def check_nothing_to_do(kernel: Kernel, name: str) -> None:
    """Check that empty spans, and no spans, change nothing."""
    fmt = FORMATS[name]
    slots = on(make_slots(fmt, 10), kernel.device)
    for spans in ([], [Span(3, 3, 0)]):
        kernel.update(fmt, slots, spans, scalar_table(kernel.hypers), scale=kernel.scale)
    assert same_bits(slots, make_slots(fmt, 10))


_SAME_DTYPES = [name for name, fmt in FORMATS.items() if fmt.param_dtype == fmt.grad_dtype]
_CHECKS: list[tuple[Callable[[Kernel, str], None], Iterable[str]]] = [
    (check_nothing_to_do, ["fp32"]),
    (check_agrees, FORMATS),
    (check_found_inf, FORMATS),
    (check_cut, FORMATS),
    (check_gradient_in_parameter, _SAME_DTYPES),
    (check_every_rounding, ["bf16-master", "bf16-split", "bf16-master-stochastic", "fp16-master"]),
]
CASES: dict[str, Callable[[Kernel], None]] = {
    f"{check.__name__.removeprefix('check_')}:{name}": partial(check, name=name)
    for check, names in _CHECKS
    for name in names
}


def interpreted(name: str) -> None:
    CASES[name](by_triton("cpu"))
