"""SGD's kernels: `torch.optim.SGD`'s update, and the reference's bits from the CPU's passes and from Triton.

As a script this file compares Triton on the CPU and prints, as JSON, why each format failed: Triton is interpreted or
not for a whole process, so the interpreter has one of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from interpreting import failures, needs_gpu, needs_triton, printed_by
from torch import Tensor

from chunkc.kernels import elementwise_cpu, elementwise_triton, reference
from chunkc.kernels.formats import GradScale, Span, UpdateFormat, num_quant_blocks, rounding_key
from chunkc.kernels.hyperparameters import scalar_table
from chunkc.kernels.sgd import MomentumFormat, SgdFormat, SgdHyper, SgdSlots
from chunkc.kernels.split import split_master

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FORMATS: dict[str, UpdateFormat] = {
    "plain": SgdFormat(FP32, FP32),
    "plain-from-bf16": SgdFormat(FP32, BF16),
    "plain-bf16-split": SgdFormat(BF16, BF16, master=True, split=True),
    "plain-bf16-master": SgdFormat(BF16, BF16, master=True),
    "plain-bf16-only": SgdFormat(BF16, BF16, rounding="stochastic"),
    "fp32": MomentumFormat(FP32, FP32),
    "fp32-bf16-buffer": MomentumFormat(FP32, FP32, "bfloat16"),
    "fp32-bf16-buffer-stochastic": MomentumFormat(FP32, FP32, "bfloat16", rounding="stochastic"),
    "fp32-int8-buffer": MomentumFormat(FP32, FP32, "int8"),
    "bf16-split": MomentumFormat(BF16, BF16, master=True, split=True),
    "bf16-split-from-fp16": MomentumFormat(BF16, FP16, master=True, split=True),
    "bf16-split-bf16-buffer": MomentumFormat(BF16, BF16, "bfloat16", master=True, split=True),
    "bf16-master": MomentumFormat(BF16, FP32, master=True),
    "bf16-master-int8-buffer": MomentumFormat(BF16, BF16, "int8", master=True),
    "bf16-only": MomentumFormat(BF16, BF16, "bfloat16", rounding="stochastic"),
    "bf16-only-int8-buffer": MomentumFormat(BF16, BF16, "int8", rounding="stochastic"),
    "fp16-master": MomentumFormat(FP16, FP16, master=True),
}
HYPERS = [
    SgdHyper(lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1, step=3),
    SgdHyper(lr=3e-3, momentum=0.8, nesterov=True, weight_decay=0.2, step=1, maximize=True),
    SgdHyper(lr=1e-3, step=7),
]
NUM_ELEMENTS = 4000
SPANS = [Span(0, 203, 0), Span(768, 1040, 1), Span(1280, 3583, 2), Span(3584, NUM_ELEMENTS, 0)]
Update = Callable[..., None]


def make_slots(fmt: UpdateFormat, seed: int = 0) -> SgdSlots:
    """Slots as some step leaves them: all about 1, or an 8-bit buffer of zeros."""
    value, grad, buffer = torch.randn(3, NUM_ELEMENTS, generator=torch.Generator().manual_seed(seed))
    found: dict[str, Tensor] = {"grad": grad.to(fmt.grad_dtype)}
    for kind in fmt.kinds:
        found[kind] = torch.zeros(NUM_ELEMENTS, dtype=torch.uint8) if fmt.quantised else buffer.to(fmt.moment_dtype)
        if fmt.quantised:
            found[f"{kind}_scale"] = torch.zeros(num_quant_blocks(NUM_ELEMENTS))
    if fmt.master:
        found["master"] = value.clone()
    if fmt.split:
        value, found["master"] = split_master(value)
    return SgdSlots.of({"param": value.to(fmt.param_dtype), **found})


def bits(slots: SgdSlots) -> dict[str, Tensor]:
    found = {"param": slots.param, **slots.states()}
    return {k: t.cpu().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.itemsize]) for k, t in found.items()}


def check_agrees(update: Update, name: str, device: str = "cpu") -> None:
    """Groups with and without momentum, ragged spans, gaps, scales: the reference's bits after each of three steps."""
    fmt = FORMATS[name]
    expected = make_slots(fmt)
    slots = SgdSlots.of({k: t.to(device, copy=True) for k, t in (("param", expected.param), ("grad", expected.grad))}
                        | {k: t.to(device, copy=True) for k, t in expected.states().items()})  # fmt: skip
    for step, first_element in ((1, 0), (2, 1 << 20), (3, 5 << 32)):
        key = rounding_key(seed=9, step=step, chunk=4) if fmt.stochastic else None
        factors = torch.tensor([0.5, 0.7, 0.0]).unbind()
        options: dict[str, Any] = {"key": key, "first_element": first_element}
        reference.chunk_update(fmt, expected, SPANS, scalar_table(HYPERS), scale=GradScale(*factors), **options)
        scale = GradScale(*[factor.to(device) for factor in factors])
        update(fmt, slots, SPANS, scalar_table(HYPERS).to(device), scale=scale, **options)
        found = bits(slots)
        assert not [kind for kind, wanted in bits(expected).items() if not torch.equal(found[kind], wanted)], step


def triton_update(fmt: UpdateFormat, slots: SgdSlots, spans: list[Span], scalars: Tensor, **options: Any) -> None:
    work = elementwise_triton.work_table(spans, fmt).to(slots.param.device)
    elementwise_triton.update(fmt, slots, work, scalars, **options)


@pytest.mark.quick(4, second=6)
@pytest.mark.parametrize("name", FORMATS)
def test_the_cpu_agrees(name: str) -> None:
    check_agrees(elementwise_cpu.chunk_update, name)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    return printed_by(__file__)


@needs_triton
@pytest.mark.parametrize("name", FORMATS)
def test_triton_agrees_interpreted(name: str, interpreted: dict[str, str]) -> None:
    assert not interpreted[name], interpreted[name]


@needs_triton
@needs_gpu
@pytest.mark.parametrize("name", FORMATS)
def test_triton_agrees_on_gpu(name: str) -> None:
    check_agrees(triton_update, name, "cuda")


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


def test_an_overflow_changes_nothing() -> None:
    slots = make_slots(FORMATS["fp32"])
    before = {kind: tensor.clone() for kind, tensor in bits(slots).items()}
    scale = GradScale(found_inf=torch.tensor(1.0))
    for update in (reference.chunk_update, elementwise_cpu.chunk_update):
        update(FORMATS["fp32"], slots, SPANS, scalar_table(HYPERS), scale=scale)
    assert all(torch.equal(tensor, before[kind]) for kind, tensor in bits(slots).items())


def test_slots_that_do_not_fit_are_refused() -> None:
    for fmt, slots, text in (
        (FORMATS["fp32"], make_slots(FORMATS["plain"]), "momentum_buffer is missing"),
        (FORMATS["plain"], make_slots(FORMATS["fp32"]), "momentum_buffer is not wanted"),
    ):
        with pytest.raises(ValueError, match=text):
            reference.chunk_update(fmt, slots, SPANS, scalar_table(HYPERS))


if __name__ == "__main__":
    print(json.dumps(failures({name: partial(check_agrees, triton_update, name) for name in FORMATS})))
