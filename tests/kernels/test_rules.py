"""Test each elementwise rule of `chunkc.optim` in each format: the CPU and Triton compute the reference's bits, however
a chunk is cut, and the device code moves vectors and contracts nothing. A new optimizer is tested here by being there.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import adam_cases
import numpy as np
import pytest
import torch
from interpreting import interpret, needs_gpu, needs_triton
from offline import TARGETS, compile_offline, fewest_accesses, spilled, targets_with_marks, vector_accesses
from torch import Tensor, nn

import chunkc
from chunkc.ir.states import UNSIGNED, num_entries
from chunkc.kernels import elementwise_cpu, elementwise_triton, reference
from chunkc.kernels.formats import AdamSlots, GradScale, Slots, Span, UpdateFormat, rounding_key
from chunkc.kernels.hyperparameters import AdamHyper, scalar_table
from chunkc.kernels.pointer_offsets import RoundingSeed, alignment_of, pointer_offsets_of
from chunkc.kernels.sgd import MomentumFormat, SgdFormat, SgdHyper
from chunkc.kernels.split import split_master
from chunkc.optim.elementwise import ElementwiseRule, Formats

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SETTINGS = {"weight_decay": 0.1, "betas": (0.4, 0.95), "momentum": 0.9, "amsgrad": True, "nesterov": True}
"""Other than the defaults, of groups that have them."""
FORMATS: dict[str, tuple[torch.dtype, torch.dtype, Formats]] = {
    "fp32": (FP32, FP32, Formats.of(FP32, None, False, 0)),
    "fp32-from-bf16-bf16-moments": (FP32, BF16, Formats.of(BF16, None, False, 0)),
    "fp32-bf16-moments-stochastic": (FP32, FP32, Formats.of(BF16, None, True, 0)),
    "fp32-int8-moments": (FP32, FP32, Formats.of("int8", None, False, 0)),
    "bf16-split": (BF16, BF16, Formats.of(FP32, "split", False, 0)),
    "bf16-split-from-fp16-bf16-moments": (BF16, FP16, Formats.of(BF16, "split", False, 0)),
    "bf16-master-from-fp32": (BF16, FP32, Formats.of(FP32, "float32", False, 0)),
    "bf16-master-int8-moments": (BF16, BF16, Formats.of("int8", "float32", False, 0)),
    "bf16-only": (BF16, BF16, Formats.of(BF16, False, True, 0)),
    "bf16-only-int8-moments": (BF16, BF16, Formats.of("int8", False, True, 0)),
    "fp16-master": (FP16, FP16, Formats.of(FP32, None, False, 0)),
    "fp64": (FP64, FP64, Formats.of(FP32, None, False, 0)),
    "fp64-from-bf16": (FP64, BF16, Formats.of(FP32, None, False, 0)),
}
NUM_ELEMENTS = 3000
SPANS = [Span(0, 203, 0), Span(768, 1040, 1), Span(1280, 2303, 2), Span(2304, NUM_ELEMENTS, 3)]
TILES = [(0, 512), (512, 768), (768, 1536), (1536, NUM_ELEMENTS)]
RAGGED_TILES = [(0, 1), (1, 17), (17, 1500), (1500, NUM_ELEMENTS)]
"""Where no block of 8-bit moments is cut."""


def elementwise_optimizers() -> Iterator[tuple[str, Any]]:
    """Optimizers of a parameter, one for each elementwise rule."""
    rules = set()
    for name in chunkc.optim.__all__:
        optimizer = getattr(chunkc.optim, name)([nn.Parameter(torch.zeros(1))], lr=1e-2)
        if isinstance(optimizer.rule, ElementwiseRule) and type(optimizer.rule) not in rules:
            rules.add(type(optimizer.rule))
            yield name, optimizer


def groups_of(optimizer: Any) -> dict[str, list[dict[str, Any]]]:
    """Parameter groups with the defaults alone; and with those and others, so that all states exist."""
    plain = optimizer.param_groups[0]
    own = {name: value for name, value in SETTINGS.items() if name in plain}
    numbers = {name: value for name, value in own.items() if value is not True}
    varied = [plain | own | {"maximize": True}, plain, plain | numbers, plain | own]
    found = {"plain": [plain | {"weight_decay": 0.1}, plain] * 2, "varied": varied}
    if "decoupled_weight_decay" in plain:
        decoupled = plain | {"decoupled_weight_decay": True}
        found["decoupled"] = [decoupled | {"weight_decay": 0.1, "betas": (0.4, 0.95)}, decoupled] * 2
    return found


RULES = {
    f"{name}-{settings}": (optimizer.rule, groups)
    for name, optimizer in elementwise_optimizers()
    for settings, groups in groups_of(optimizer).items()
}
CASES = [f"{rule}:{fmt}" for rule, fmt in itertools.product(RULES, FORMATS)]
STEPS = ((1, 0), (2, 1 << 20), (3, (5 << 32) - 2048))
"""Each update's number, and the first element's index: its 32 lower bits wrap in the last one."""


def case_of(name: str) -> tuple[UpdateFormat, list[Any]]:
    """The format of a case, and each group's hyperparameters."""
    rule_name, _, format_name = name.partition(":")
    rule, groups = RULES[rule_name]
    param_dtype, grad_dtype, formats = FORMATS[format_name]
    rule = type(rule)(formats)
    return rule.format(param_dtype, grad_dtype, rule.states(groups).dtypes(param_dtype)), [
        rule.hyper(group, step) for step, group in enumerate(groups, start=1)
    ]


def make_slots(fmt: UpdateFormat) -> Slots:
    """Random data with special values, or 8-bit moments of zeros."""
    generator = torch.Generator().manual_seed(0)
    flat: dict[str, Tensor] = {}
    dtypes: Mapping[str, torch.dtype] = {"param": fmt.param_dtype, "grad": fmt.grad_dtype} | dict.fromkeys(
        fmt.kinds, fmt.moment_dtype
    )
    for kind, dtype in dtypes.items():
        values = torch.randn(NUM_ELEMENTS, generator=generator, dtype=FP64)
        values = values.square() if kind in UNSIGNED else values
        flat[kind] = torch.zeros(NUM_ELEMENTS, dtype=dtype) if dtype == torch.uint8 else values.to(dtype)
        if dtype == torch.uint8:
            flat[f"{kind}_scale"] = torch.zeros(num_entries(f"{kind}_scale", NUM_ELEMENTS))
    if fmt.master:
        low = torch.randint(-(1 << 14), 1 << 14, (NUM_ELEMENTS,), generator=generator, dtype=torch.int16)
        flat["master"] = low if fmt.split else flat["param"].float()
    return adam_cases.with_special_values(fmt.slots.of(flat))


def copied(fmt: UpdateFormat, slots: Slots, device: str = "cpu") -> Slots:
    buffers = {"param": slots.param, "grad": slots.grad, **slots.states()}
    return fmt.slots.of({kind: tensor.to(device, copy=True) for kind, tensor in buffers.items()})


def differing(slots: Slots, expected: Slots) -> list[str]:
    """The parameter and states that do not have the expected bits."""
    wanted = {"param": expected.param, **expected.states()}
    return [kind for kind, tensor in wanted.items() if not adam_cases.same_values(slots[kind].cpu(), tensor)]


def part_of_spans(begin: int, end: int) -> list[Span]:
    """What of `SPANS` lies in a tile, as seen from its beginning."""
    cut = [Span(max(a, begin) - begin, min(b, end) - begin, group) for a, b, group in SPANS]
    return [span for span in cut if span.begin < span.end]


def check_agrees(update: Callable[..., None], name: str, device: str = "cpu") -> None:
    """Several groups, ragged spans, gaps and scales: the reference's bits after each of three updates, in tiles, too;
    and what was there where `found_inf` is set."""
    fmt, hypers = case_of(name)
    expected = make_slots(fmt)
    slots, tiles = copied(fmt, expected, device), copied(fmt, expected, device)
    scalars = fmt.scalar_table(hypers)
    for step, first_element in STEPS:
        factors = torch.tensor([0.5, 0.7, 0.0]).unbind()
        options: dict[str, Any] = {"key": rounding_key(seed=9, step=step, chunk=4) if fmt.stochastic else None}
        before = copied(fmt, expected)
        reference.chunk_update(
            fmt, expected, SPANS, scalars, scale=GradScale(*factors), first_element=first_element, **options
        )
        assert "param" in differing(before, expected)
        there, scale = scalars.to(device), GradScale(*[factor.to(device) for factor in factors])
        if step == 1:
            skipping = replace(scale, found_inf=torch.tensor(float("nan"), device=device))
            update(fmt, slots, SPANS, there, scale=skipping, first_element=first_element, **options)
            assert not differing(slots, before)
        update(fmt, slots, SPANS, there, scale=scale, first_element=first_element, **options)
        assert not differing(slots, expected), f"step {step}"
        for begin, end in TILES if fmt.span_alignment > 1 else RAGGED_TILES:
            part, options["first_element"] = tiles.part(begin, end), first_element + begin
            update(fmt, part, part_of_spans(begin, end), there, scale=scale, **options)
        assert not differing(tiles, expected), f"in tiles, step {step}"
    for begin, end in ((203, 768), (1040, 1280), (2303, 2304)):
        assert adam_cases.same_values(expected.param[begin:end], make_slots(fmt).param[begin:end]), "between spans"


def by_triton(fmt: UpdateFormat, slots: Slots, spans: list[Span], scalars: Tensor, **options: Any) -> None:
    work = elementwise_triton.work_table(spans, fmt).to(slots.param.device)
    elementwise_triton.update(fmt, slots, work, scalars, **options)


BY_TRITON = [name for name in CASES if not case_of(name)[0].by_reference]


@pytest.mark.quick(7, second=13)
@pytest.mark.parametrize("name", CASES)
def test_the_cpu_agrees(name: str) -> None:
    check_agrees(elementwise_cpu.chunk_update, name)


def check_special(update: Callable[..., None], device: str = "cpu") -> None:
    """Gradients in the parameter's own memory, roundings of all masters, and spans with nothing in them."""
    for name in adam_cases.ROUNDED:
        check_gradient_in_parameter(update, name, device)
        check_every_rounding(update, name, device)
    fmt = adam_cases.FORMATS["fp32"]
    slots = adam_cases.on(adam_cases.make_slots(fmt, 10), device)
    for spans in ([], [Span(3, 3, 0)]):
        update(fmt, slots, spans, scalar_table(adam_cases.HYPERS).to(device))
    assert adam_cases.same_bits(slots, adam_cases.make_slots(fmt, 10))


def check_gradient_in_parameter(update: Callable[..., None], name: str, device: str) -> None:
    fmt = adam_cases.FORMATS[name]
    apart = adam_cases.on(adam_cases.make_slots(fmt, 3000), device)
    apart.param.copy_(apart.grad) if fmt.master else apart.grad.copy_(apart.param)
    shared = adam_cases.on(apart, device)
    shared = replace(shared, grad=shared.param)
    for slots in (apart, shared):
        scalars = scalar_table(adam_cases.HYPERS).to(device)
        update(fmt, slots, [Span(0, 3000, 0)], scalars, key=adam_cases.key_of(fmt))
    assert adam_cases.same_bits(shared, replace(apart, grad=apart.param))


def check_every_rounding(update: Callable[..., None], name: str, device: str) -> None:
    """With lr = 0 and no decay: a third of all upper halves of masters, each with critical lower halves."""
    fmt = adam_cases.FORMATS[name]
    lower = torch.tensor([0, 1, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    master = ((torch.arange(0, 1 << 16, 3).unsqueeze(1) << 16) + lower).flatten().to(torch.int32).view(FP32)
    zeros = torch.zeros_like(master)
    param, kept = split_master(master) if fmt.split else (zeros.to(fmt.param_dtype), master)
    expected = AdamSlots(param, zeros.to(fmt.grad_dtype), zeros.clone(), zeros.clone(), kept.clone())
    slots, scalars = adam_cases.on(expected, device), scalar_table([AdamHyper(lr=0.0)])
    spans, key = [Span(0, len(master), 0)], adam_cases.key_of(fmt)
    reference.chunk_update(fmt, expected, spans, scalars, key=key)
    update(fmt, slots, spans, scalars.to(device), key=key)
    assert adam_cases.same_values(slots.param.cpu(), expected.param)
    assert fmt.stochastic or adam_cases.same_values(slots.param.cpu(), master.to(fmt.param_dtype))
    assert not fmt.split or torch.equal(slots.master.cpu(), kept)


def test_special_slots_on_the_cpu() -> None:
    check_special(elementwise_cpu.chunk_update)


def interpreted(name: str) -> None:
    check_agrees(by_triton, name) if name else check_special(by_triton)


@pytest.mark.second_tier
@needs_triton
def test_special_slots_by_triton_interpreted() -> None:
    interpret(__file__)


@needs_triton
@needs_gpu
def test_special_slots_on_gpu() -> None:
    check_special(by_triton, "cuda")


@pytest.mark.quick(7, second=13)
@needs_triton
@pytest.mark.parametrize("name", BY_TRITON)
def test_triton_agrees_interpreted(name: str) -> None:
    interpret(__file__, name)


@needs_triton
@needs_gpu
@pytest.mark.parametrize("name", BY_TRITON)
def test_triton_agrees_on_gpu(name: str) -> None:
    check_agrees(by_triton, name, "cuda")


def compiled(name: str, target: str, folder: Path, *, num_tensors: int = 0, **options: Any) -> Any:
    """Compile what a launch would.

    Args:
        num_tensors: of several tensors, each where it lies, but all aligned alike; 0: of one chunk.
    """
    from chunkc.kernels.elementwise_triton_kernel import elementwise_kernel

    fmt, hypers = case_of(name)
    addresses = np.arange(num_tensors)[:, None] * alignment_of(fmt)
    seeds = [RoundingSeed(number, rounding_key(0, 1, number)) for number in range(num_tensors)]
    work = elementwise_triton.work_table([Span(0, 2048, 0)], fmt)
    arguments = elementwise_triton.launch_arguments(
        fmt,
        make_slots(fmt).part(0, 2048),
        elementwise_triton.work_of_tensors([(2048, 0)] * num_tensors, fmt) if num_tensors else work,
        fmt.scalar_table(hypers),
        scale=GradScale(*torch.ones(3).unbind()),
        key=rounding_key(0, 1, 0) if fmt.stochastic else None,
        pointer_offsets=pointer_offsets_of(addresses, fmt, seeds) if num_tensors else None,
    )
    arguments["ARITHMETIC"] = fmt.arithmetic.in_triton
    return compile_offline(elementwise_kernel, arguments, target, folder, options)


def check_device_code(name: str, target: str, num_tensors: int, folder: Path) -> None:
    """Nothing spills, memory moves in vectors, and no multiply and add becomes one operation with one rounding."""
    fmt, _ = case_of(name)
    kernel = compiled(name, target, folder, num_tensors=num_tensors)
    assert not any(spilled(kernel, folder).values())
    moments = [fmt.moment_dtype] * len(fmt.kinds)
    read = [fmt.grad_dtype, *moments, fmt.master_dtype or fmt.param_dtype] + [fmt.param_dtype] * fmt.split
    wanted = fewest_accesses(read, [fmt.param_dtype, *moments, *([fmt.master_dtype] if fmt.master_dtype else [])])
    on_nvidia = TARGETS[target][0] == "cuda"  # AMD's devices load a group's scalars in pairs or in fours
    num_scalars = len(fmt.scalars._fields)
    most = wanted if on_nvidia else wanted + Counter(ld8=num_scalars // 2, ld16=num_scalars // 4)
    assert wanted <= vector_accesses(kernel) <= most
    assert not on_nvidia or "fma" not in kernel.asm["ptx"]


@pytest.mark.quick(5, second=7)
@needs_triton
@pytest.mark.parametrize("name", BY_TRITON)
def test_device_code_moves_vectors_and_contracts_nothing(name: str, tmp_path: Path) -> None:
    check_device_code(name, "sm_90", 0, tmp_path)


@needs_triton
@pytest.mark.parametrize(
    ("name", "target", "num_tensors"),
    [
        *(
            pytest.param(f"Adam-decoupled:{fmt}", target, 0, marks=marks)
            for fmt in ("fp32", "bf16-master-from-fp32", "bf16-split", "bf16-only", "bf16-only-int8-moments")
            for target, marks in targets_with_marks()
            if target != "sm_90"
        ),
        *(
            (f"Adam-decoupled:{fmt}", target, 2)
            for fmt in ("fp32", "bf16-split", "bf16-only")
            for target in ("sm_70", "sm_90")
        ),
    ],
)
def test_so_does_that_of_other_targets_and_of_several_tensors(
    name: str, target: str, num_tensors: int, tmp_path: Path
) -> None:
    check_device_code(name, target, num_tensors, tmp_path)


@needs_triton
def test_nothing_is_contracted_on_amd(tmp_path: Path) -> None:
    num_fma = [
        len(re.findall(r"\bv_(?:pk_)?fmac?_f32", kernel.asm["amdgcn"]))
        for kernel in (
            compiled("Adam-decoupled:bf16-split", "gfx942", tmp_path, enable_fp_fusion=fused) for fused in (False, True)
        )
    ]
    assert num_fma[0] < num_fma[1]  # division and square root are made of some


def test_without_momentum_both_formats_of_sgd_have_the_same_bits() -> None:
    """So a parameter's bits do not depend on whether its chunk has room for a buffer; and the buffer stays as it is."""
    plain_format, momentum_format = SgdFormat(FP32, FP32), MomentumFormat(FP32, FP32)
    plain, other = make_slots(plain_format), make_slots(momentum_format)
    before, scalars = other.states()["momentum_buffer"].clone(), plain_format.scalar_table([SgdHyper(lr=1e-3, step=7)])
    reference.chunk_update(plain_format, plain, [Span(0, NUM_ELEMENTS, 0)], scalars)
    elementwise_cpu.chunk_update(momentum_format, other, [Span(0, NUM_ELEMENTS, 0)], scalars)
    assert adam_cases.same_values(plain.param, other.param)
    assert adam_cases.same_values(other.states()["momentum_buffer"], before)
