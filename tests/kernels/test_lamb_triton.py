"""The Triton LAMB update: interpreted on the CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import lamb_reference as lamb
import pytest
import torch
from interpreting import interpret, needs_gpu, needs_triton
from torch import Tensor

from chunkc.ir.errors import UnsupportedError
from chunkc.kernels import lamb_triton
from chunkc.kernels.formats import NO_SCALE, AdamFormat, AdamSlots, GradScale, Span
from chunkc.kernels.hyperparameters import scalar_table
from chunkc.kernels.lamb_formats import ROW, LambHyper, lamb_work, new_partials

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FORMATS = {
    "fp32": AdamFormat(FP32, FP32),
    "bf16-master": AdamFormat(BF16, BF16, master=True),
    "fp16-master": AdamFormat(FP16, FP32, master=True),
}
SCALARS = scalar_table(
    [
        LambHyper(1e-2, weight_decay=0.1, step=3),
        LambHyper(1e-2, beta1=0.4, step=2, adapt=False, maximize=True),
        LambHyper(1e-2, weight_decay=0.1, step=3, max_coeff=0.3),
    ]
)
NUM_ELEMENTS = 2 * ROW + 4000
TENSORS = [
    Span(0, 100, 0),
    Span(128, ROW + 2005, 0),
    Span(ROW + 2009, ROW + 2021, 1),
    Span(2 * ROW - 7, NUM_ELEMENTS, 2),
]
TILES = [(0, 300), (300, 300 + 5), (305, ROW), (ROW, NUM_ELEMENTS)]


def make_slots(fmt: AdamFormat, device: str) -> AdamSlots:
    generator = torch.Generator().manual_seed(0)
    value, grad, exp_avg, exp_avg_sq = torch.randn(4, NUM_ELEMENTS, generator=generator)
    made = [value.to(fmt.param_dtype), grad.to(fmt.grad_dtype), exp_avg * 0.1, exp_avg_sq.square() * 0.1]
    made += [value.clone()] if fmt.master else []
    return AdamSlots(*[tensor.to(device) for tensor in made])


def tensors_of(slots: AdamSlots) -> list[Tensor]:
    return [t.cpu() for t in (getattr(slots, field.name) for field in fields(slots)) if t is not None]


def same(slots: AdamSlots, other: AdamSlots) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors_of(slots), tensors_of(other), strict=True))


def check_agrees(device: str, name: str, tiles: list[tuple[int, int]], scale: GradScale = NO_SCALE) -> None:
    """Moments and, from the same sums, parameters have the reference's bits; sums are right, and the same each time."""
    fmt = FORMATS[name]
    expected, slots, again = make_slots(fmt, "cpu"), make_slots(fmt, device), make_slots(fmt, device)
    works = lamb_work(TENSORS, tiles)
    sums = new_partials(works[0]).fill_(7)
    partials = new_partials(works[0], device).fill_(7)
    partials_again = partials.clone()
    there = GradScale(*[None if t is None else t.to(device) for t in (scale.unscale, scale.clip, scale.found_inf)])
    for work, tile in zip(works, tiles, strict=True):
        lamb.lamb_moments(fmt, expected.part(*tile), work, SCALARS, sums, scale=scale)
        for each, buffer in ((slots, partials), (again, partials_again)):
            part = each.part(*tile)
            lamb_triton.lamb_moments(fmt, part, lamb.on(work, device), SCALARS.to(device), buffer, scale=there)
    assert same(slots, expected)
    assert torch.equal(partials.cpu(), partials_again.cpu())
    torch.testing.assert_close(partials.cpu(), sums, rtol=1e-6, atol=0)
    for work, tile in zip(works, tiles, strict=True):
        lamb.lamb_apply(fmt, expected.part(*tile), work, SCALARS, sums, scale=scale)
        for each in (slots, again):
            part = each.part(*tile)
            lamb_triton.lamb_apply(fmt, part, lamb.on(work, device), SCALARS.to(device), partials, scale=there)
    assert same(slots, again)
    for tensor, other in zip(tensors_of(slots), tensors_of(expected), strict=True):
        torch.testing.assert_close(tensor, other, rtol=2e-7 if tensor.dtype == FP32 else 0.01, atol=1e-7)
    untouched = scale.found_inf is not None and bool(scale.found_inf != 0)
    assert same(slots, make_slots(fmt, "cpu")) == untouched
    assert bool((partials == 7).all()) == untouched


def check_empty(device: str) -> None:
    """No rows, no launch."""
    fmt = FORMATS["bf16-master"]
    slots = make_slots(fmt, device)
    (work,) = lamb_work([], [(0, NUM_ELEMENTS)])
    lamb.update(lamb_triton, fmt, slots, lamb.on(work, device), SCALARS.to(device))
    assert same(slots, make_slots(fmt, "cpu"))


def _scale(found_inf: float) -> GradScale:
    return GradScale(torch.tensor(0.5), torch.tensor(0.3), torch.tensor(found_inf))


CASES: dict[str, Callable[[str], None]] = {
    "fp32": lambda device: check_agrees(device, "fp32", [(0, NUM_ELEMENTS)]),
    "fp32-tiles": lambda device: check_agrees(device, "fp32", TILES, _scale(0.0)),
    "bf16-master": lambda device: check_agrees(device, "bf16-master", [(0, NUM_ELEMENTS)], _scale(0.0)),
    "fp16-master": lambda device: check_agrees(device, "fp16-master", TILES),
    "found-inf": lambda device: check_agrees(device, "fp32", [(0, NUM_ELEMENTS)], _scale(1.0)),
    "found-nan": lambda device: check_agrees(device, "bf16-master", TILES, _scale(float("nan"))),
    "empty": check_empty,
}


def interpreted(name: str) -> None:
    CASES[name]("cpu")


@pytest.mark.second_tier
@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str) -> None:
    interpret(__file__, name)


@needs_triton
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_on_gpu(name: str) -> None:
    CASES[name]("cuda")


@needs_triton
def test_the_cpu_needs_the_interpreter() -> None:
    (work,) = lamb_work(TENSORS, [(0, NUM_ELEMENTS)])
    with pytest.raises(UnsupportedError, match="lamb_cpu"):
        lamb.update(lamb_triton, FORMATS["fp32"], make_slots(FORMATS["fp32"], "cpu"), work, SCALARS)
