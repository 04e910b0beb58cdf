"""Slots to update, and checks of the Triton kernel, as cases that run on any device.

Cases run in a process of their own where Triton is interpreted: that is decided for a whole process, when Triton is
imported. As a script this file reads names of cases, a line each, and answers each with a line of JSON. Every case
computes what it expects on the CPU: a device has no say in an update's bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from chunkc.kernels import elementwise_triton, reference
from chunkc.kernels.formats import NO_SCALE, AdamFormat, AdamSlots, GradScale, Span, num_quant_blocks, rounding_key
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


def tensors(slots: AdamSlots) -> list[Tensor | None]:
    return [getattr(slots, field.name) for field in fields(slots)]


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same_bits(slots: AdamSlots, other: AdamSlots) -> bool:
    """Whether all tensors are equal to the bit, but for NaNs: a device may choose their bit pattern."""
    pairs = list(zip(tensors(slots), tensors(other)))
    assert all((a is None) == (b is None) for a, b in pairs)
    return all(_same_bits(a.cpu(), b.cpu()) for a, b in pairs if a is not None and b is not None)


def _same_bits(tensor: Tensor, other: Tensor) -> bool:
    nan = tensor.isnan() if tensor.is_floating_point() else torch.zeros_like(tensor, dtype=torch.bool)
    return torch.equal(nan, other.isnan() if other.is_floating_point() else nan) and torch.equal(
        bits(tensor)[~nan], bits(other)[~nan]
    )


def with_special_values(slots: AdamSlots) -> AdamSlots:
    """Put infinities, NaN, signed zeros, subnormals and rounding ties at several places of every tensor."""
    infinity = float("inf")
    special = torch.tensor([infinity - infinity, infinity, -infinity, 0, -0.0, 1e-40, 1 + 2**-8, 1 + 3 * 2**-8])
    for shift, tensor in enumerate(tensors(slots)):
        if tensor is not None and tensor.is_floating_point() and tensor.numel() > 100:
            for start in range(shift, tensor.numel() - len(special), 371):
                tensor[start : start + len(special)] = special.to(tensor.dtype)
    return slots


@torch.no_grad()
def adam_update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    master: Tensor | None,
    hyper: AdamHyper,
) -> None:
    """Update as Adam or AdamW do, `[n]` elements in torch's own operations, in place, on any device.

    The operations are those of `torch.optim.adam._single_tensor_adam` (neither amsgrad nor capturable), in
    that order: fp32 parameters get the very bits of `torch.optim.Adam(foreach=False)`. With a master, the
    update is the master's, and `param` becomes its copy, rounded to nearest even. Gradients are widened to
    fp32 first. `grad` is left alone; it may share `param`'s memory.

    Args:
        param: `[n]`, fp32 (then `master` is None), bf16 or fp16.
        grad: `[n]`, fp32, bf16 or fp16.
        exp_avg, exp_avg_sq: `[n]`, fp32.
        master: `[n]`, fp32; or int16, the lower bits of a split one; or None.
    """
    split = master is not None and master.dtype == torch.int16
    target = param if master is None else join_master(param, master) if split else master
    scalars = hyper.scalars()
    wide = grad.to(torch.float32, copy=True)
    if hyper.maximize:
        wide = -wide
    if hyper.weight_decay != 0:
        if hyper.decoupled:
            target.mul_(scalars.decay)
        else:
            wide = wide.add(target, alpha=hyper.weight_decay)
    exp_avg.lerp_(wide, scalars.lerp_weight)
    exp_avg_sq.mul_(hyper.beta2).addcmul_(wide, wide, value=scalars.one_minus_beta2)
    denom = (exp_avg_sq.sqrt() / scalars.bias_correction2_sqrt).add_(hyper.eps)
    target.addcdiv_(exp_avg, denom, value=scalars.neg_step_size)
    if master is not None and split:
        for place, values in zip((param, master), split_master(target), strict=True):
            place.copy_(values)
    elif master is not None:
        param.copy_(master)


def triton_update(fmt: AdamFormat, slots: AdamSlots, spans: list[Span], scalars: Tensor, **options: object) -> None:
    """Call the kernel with the signature of the reference."""
    device = slots.param.device
    elementwise_triton.update(
        fmt, slots, elementwise_triton.work_table(spans, fmt).to(device), scalars.to(device), **options
    )


def check_agrees(device: str, name: str) -> None:
    """Check that each of three steps has the reference's bits.

    There are several groups, ragged spans, gaps, special values and scales.
    """
    fmt = FORMATS[name]
    align = fmt.span_alignment
    expected = with_special_values(make_slots(fmt, 4000, seed=1))
    slots = on(expected, device)
    spans = [Span(0, 203, 0), Span(3 * align if align > 1 else 205, 1040, 1), Span(1280, 3583, 2), Span(3584, 4000, 0)]
    for step, first_element in ((1, 0), (2, 1 << 20), (3, 5 << 32)):
        key = rounding_key(seed=9, step=step, chunk=4) if fmt.stochastic else None
        scale = GradScale(torch.tensor(0.5), torch.tensor(0.7), torch.tensor(0.0))
        options = {"key": key, "first_element": first_element}
        reference.chunk_update(fmt, expected, spans, scalar_table(HYPERS), scale=scale, **options)
        scale = GradScale(*[t.to(device) for t in (scale.unscale, scale.clip, scale.found_inf)])
        triton_update(fmt, slots, spans, scalar_table(HYPERS), scale=scale, **options)
        assert same_bits(slots, expected), f"step {step}"


def check_found_inf(device: str, name: str) -> None:
    """Check that nothing changes where found_inf is not 0, NaN included; all changes where it is."""
    fmt = FORMATS[name]
    slots = on(make_slots(fmt, 1000), device)
    before = on(slots, "cpu")
    key = rounding_key(0, 1, 0) if fmt.stochastic else None
    for found_inf in (1.0, float("inf"), float("nan"), 0.0):
        scale = GradScale(found_inf=torch.tensor(found_inf, device=device))
        triton_update(fmt, slots, [Span(0, 1000, 0)], scalar_table(HYPERS), scale=scale, key=key)
        assert same_bits(slots, before) == (found_inf != 0), found_inf


def check_cut(device: str, name: str) -> None:
    """Check that a chunk has the same bits, updated at once and in tiles."""
    fmt = FORMATS[name]
    whole = on(with_special_values(make_slots(fmt, 5000)), device)
    tiles = on(whole, device)
    key = rounding_key(0, 1, 0) if fmt.stochastic else None
    triton_update(fmt, whole, [Span(0, 5000, 2)], scalar_table(HYPERS), key=key)
    cuts = [0, 512, 768, 3328, 5000] if fmt.quantised else [0, 1, 18, 500, 1536, 3001, 5000]
    for begin, end in itertools.pairwise(cuts):
        spans, part = [Span(0, end - begin, 2)], tiles.part(begin, end)
        triton_update(fmt, part, spans, scalar_table(HYPERS), key=key, first_element=begin)
    assert same_bits(whole, tiles)
    again = on(with_special_values(make_slots(fmt, 5000)), device)
    triton_update(fmt, again, [Span(0, 1280, 2), Span(1280, 5000, 2)], scalar_table(HYPERS), key=key)
    assert same_bits(whole, again)


def check_gradient_in_parameter(device: str, name: str) -> None:
    """Check an update with the gradient in the parameter's own memory."""
    fmt = FORMATS[name]
    apart = on(make_slots(fmt, 3000), device)
    if fmt.master:
        apart.param.copy_(apart.grad)
    else:
        apart.grad.copy_(apart.param)
    shared = on(apart, device)
    shared = AdamSlots(shared.param, shared.param, *tensors(shared)[2:])
    key = rounding_key(0, 1, 0) if fmt.stochastic else None
    for slots in (apart, shared):
        triton_update(fmt, slots, [Span(0, 3000, 0)], scalar_table(HYPERS), key=key)
    assert same_bits(shared, AdamSlots(apart.param, apart.param, *tensors(apart)[2:]))


def check_every_rounding(device: str, name: str) -> None:
    """Check that parameters are the masters' rounding, with lr = 0 and no decay.

    Masters have a third of all upper halves, each with critical lower halves.
    """
    fmt = FORMATS[name]
    lower = torch.tensor([0, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    master = ((torch.arange(0, 1 << 16, 3).unsqueeze(1) << 16) + lower).flatten().to(torch.int32).view(FP32)
    zeros = torch.zeros_like(master)
    param, kept = split_master(master) if fmt.split else (zeros.to(fmt.param_dtype), master)
    expected = AdamSlots(param, zeros.to(fmt.grad_dtype), zeros.clone(), zeros.clone(), kept.clone())
    slots = on(expected, device)
    key = rounding_key(0, 1, 0) if fmt.stochastic else None
    for update, each in ((reference.chunk_update, expected), (triton_update, slots)):
        update(fmt, each, [Span(0, len(master), 0)], scalar_table([AdamHyper(lr=0.0)]), key=key)
    number = ~expected.param.isnan()
    assert torch.equal(slots.param.cpu().isnan(), ~number)
    assert torch.equal(bits(slots.param)[number], bits(expected.param)[number])
    if not fmt.stochastic:
        assert torch.equal(bits(slots.param)[number], bits(master.to(fmt.param_dtype))[number])
    if fmt.split:
        assert torch.equal(bits(slots.master), bits(kept))


def check_nothing_to_do(device: str) -> None:
    """Check that empty spans, and no spans, change nothing."""
    fmt = FORMATS["fp32"]
    slots = on(make_slots(fmt, 10), device)
    for spans in ([], [Span(3, 3, 0)]):
        triton_update(fmt, slots, spans, scalar_table(HYPERS), scale=NO_SCALE)
    assert same_bits(slots, make_slots(fmt, 10))


CASES: dict[str, Callable[[str], None]] = {"nothing-to-do": check_nothing_to_do}
for _name, _format in FORMATS.items():
    CASES[f"agrees:{_name}"] = lambda device, name=_name: check_agrees(device, name)  # type: ignore[misc]
    CASES[f"found-inf:{_name}"] = lambda device, name=_name: check_found_inf(device, name)  # type: ignore[misc]
    CASES[f"cut:{_name}"] = lambda device, name=_name: check_cut(device, name)  # type: ignore[misc]
    if _format.param_dtype == _format.grad_dtype:
        CASES[f"gradient-in-parameter:{_name}"] = lambda device, name=_name: check_gradient_in_parameter(device, name)  # type: ignore[misc]
for _name in ("bf16-master", "bf16-split", "bf16-master-stochastic", "fp16-master"):
    CASES[f"every-rounding:{_name}"] = lambda device, name=_name: check_every_rounding(device, name)  # type: ignore[misc]


def interpreted(name: str) -> None:
    CASES[name]("cpu")
