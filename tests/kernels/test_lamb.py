"""LAMB on the CPU and by Triton: tensors across tiles, scales, bits, tables. The formula is in `optim/test_lamb`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import adam_cases
import lamb_reference
import numpy as np
import pytest
import torch
from interpreting import interpret, needs_gpu, needs_triton
from offline import compile_offline, fewest_accesses, spilled, targets_with_marks, vector_accesses

from chunkc.ir.errors import UnsupportedError
from chunkc.kernels import lamb_cpu, lamb_triton
from chunkc.kernels.formats import NO_SCALE, AdamFormat, AdamSlots, GradScale, Span
from chunkc.kernels.hyperparameters import scalar_table
from chunkc.kernels.lamb_formats import ROW, LambHyper, lamb_work, lamb_work_of_tensors, new_partials
from chunkc.kernels.pointer_offsets import alignment_of, pointer_offsets_of
from chunkc.runtime.device import cpu_allocator

FP32, BF16 = torch.float32, torch.bfloat16
FORMATS = {"fp32": AdamFormat(FP32, FP32), "bf16-master": AdamFormat(BF16, BF16, master=True)}
ADAPTED = LambHyper(lr=1e-2, weight_decay=0.1, step=3)
PLAIN = LambHyper(lr=1e-2, step=3, adapt=False)
SCALARS = scalar_table([ADAPTED, PLAIN])
NUM_ELEMENTS = 5 * ROW + 300
TENSORS = [
    Span(0, 100, 0),
    Span(128, 4 * ROW + 5, 0),
    Span(4 * ROW + 16, 4 * ROW + 21, 1),
    Span(5 * ROW, 5 * ROW + 300, 0),
]
kernels = pytest.mark.parametrize("kernel", [lamb_reference, lamb_cpu], ids=["reference", "cpu"])
formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def make_slots(fmt: AdamFormat, num_elements: int = NUM_ELEMENTS, seed: int = 0) -> AdamSlots:
    return adam_cases.make_slots(fmt, num_elements, seed)


def test_no_number_of_threads_changes_a_bit():
    fmt = FORMATS["fp32"]
    one, many = make_slots(fmt), make_slots(fmt)
    (work,) = lamb_work(TENSORS, [(0, NUM_ELEMENTS)])
    for slots, number in ((one, 1), (many, 3)):
        with adam_cases.num_threads(number):
            lamb_reference.update(lamb_cpu, fmt, slots, work, SCALARS)
    assert adam_cases.same_bits(one, many)


def test_little_is_allocated():
    """Only the sums: a few bytes for each row and tensor."""
    fmt = FORMATS["bf16-master"]
    lamb_cpu.warm_up(fmt)
    cpu_allocator.install()
    slots = make_slots(fmt)
    (work,) = lamb_work(TENSORS, [(0, NUM_ELEMENTS)])
    before = adam_cases.on(slots, "cpu")
    with cpu_allocator.hard_limit(cpu_allocator.current_nbytes() + 4096):
        lamb_reference.update(lamb_cpu, fmt, slots, work, SCALARS)
    assert not torch.equal(slots.param, before.param)


@pytest.mark.parametrize(
    ("tensors", "tiles", "message"),
    [
        ([Span(5, 9, 0), Span(8, 10, 0)], [(0, 10)], "tensors must be in order"),
        ([Span(5, 4, 0)], [(0, 10)], "tensors must be in order"),
        ([Span(0, 4, 0)], [(0, 3), (2, 10)], "tiles must be in order"),
        ([Span(0, 4, 0)], [(0, 3)], "element 3 of the tensor .0, 4. lies in no tile"),
        ([Span(0, 4, 0)], [(1, 4)], "element 0"),
        ([Span(0, 4, -1)], [(0, 4)], "groups"),
    ],
)
def test_unsuitable_tables_are_refused(tensors, tiles, message):
    with pytest.raises(ValueError, match=message):
        lamb_work(tensors, tiles)


@kernels
@pytest.mark.parametrize("stage", ["lamb_moments", "lamb_apply"])
def test_unsuitable_arguments_are_refused(kernel, stage):
    fmt = FORMATS["fp32"]
    slots = make_slots(fmt, 10)
    (work,) = lamb_work([Span(0, 10, 1)], [(0, 10)])
    run, partials = getattr(kernel, stage), new_partials(work)
    for wrong, message in (
        ((AdamFormat(FP32, FP32, "bfloat16"), slots, work, SCALARS, partials), "LAMB needs"),
        ((fmt, make_slots(fmt, 11), work, SCALARS, partials), "tile of 10"),
        ((fmt, slots, work, SCALARS[:1], partials), "scalars must be"),
        ((fmt, slots, work, SCALARS, partials[:, :0]), "partials must be"),
        ((FORMATS["bf16-master"], slots, work, SCALARS, partials), "param must be"),
        ((fmt, slots, lamb_work_of_tensors([Span(0, 10, 1)]), SCALARS, partials), "of several tensors"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*wrong)


@pytest.mark.parametrize(
    ("kernel", "device", "error", "message"),
    [
        (lamb_cpu, "meta", ValueError, "on the CPU"),
        pytest.param(lamb_triton, "cpu", UnsupportedError, "lamb_cpu", marks=needs_triton),
    ],
)
def test_other_devices_are_refused(kernel, device, error, message):
    fmt = FORMATS["fp32"]
    slots = adam_cases.on(make_slots(fmt, 10), device)
    work = lamb_reference.on(lamb_work([Span(0, 10, 0)], [(0, 10)])[0], device)
    with pytest.raises(error, match=message):
        lamb_reference.update(kernel, fmt, slots, work, SCALARS.to(device))


# ---------------------------------------------------------------- the CPU and Triton beside the reference

ALL_FORMATS = FORMATS | {"fp16-master": AdamFormat(torch.float16, FP32, master=True)}
ALL_SCALARS = scalar_table(
    [
        LambHyper(1e-2, weight_decay=0.1, step=3),
        LambHyper(1e-2, beta1=0.4, step=2, maximize=True),
        LambHyper(1e-2, weight_decay=0.1, step=3, max_coeff=0.3),
        LambHyper(1e-2, weight_decay=0.1, step=3, min_coeff=3.0),
        PLAIN,
    ]
)
NUM_MANY = 2 * ROW + 4000
MANY_TENSORS = [
    Span(0, 100, 3),
    Span(128, ROW + 2005, 0),
    Span(ROW + 2009, ROW + 2021, 1),
    Span(2 * ROW - 7, NUM_MANY - 300, 2),
    Span(NUM_MANY - 288, NUM_MANY - 100, 4),
    Span(NUM_MANY - 64, NUM_MANY, 0),
]
MANY_TILES = [(0, 300), (300, 300 + 5), (305, ROW), (ROW, NUM_MANY)]


def make_many(fmt: AdamFormat) -> AdamSlots:
    """Slots of several tensors: one without gradient, whose moments begin, and one of zeros."""
    slots = make_slots(fmt, NUM_MANY)
    adam_cases.target_of(fmt, slots)[-64:] = 0
    for tensor in (slots.grad, slots.exp_avg, slots.exp_avg_sq):
        tensor[ROW + 2009 : ROW + 2021] = 0
    return slots


def check_agrees(
    kernel: ModuleType, device: str, name: str, tiles: list[tuple[int, int]], scale: GradScale = NO_SCALE
) -> None:
    """Moments and, on the CPU from the same sums, parameters have the reference's bits; sums are right, and the same
    each time."""
    fmt = ALL_FORMATS[name]
    expected = make_many(fmt)
    slots, again = (adam_cases.on(expected, device) for _ in range(2))
    works = lamb_work(MANY_TENSORS, tiles)
    sums = new_partials(works[0]).fill_(7)
    partials = new_partials(works[0], device).fill_(7)
    partials_again, scalars = partials.clone(), ALL_SCALARS.to(device)
    there = GradScale(*[None if t is None else t.to(device) for t in (scale.unscale, scale.clip, scale.found_inf)])
    for work, tile in zip(works, tiles, strict=True):
        lamb_reference.lamb_moments(fmt, expected.part(*tile), work, ALL_SCALARS, sums, scale=scale)
        for each, buffer in ((slots, partials), (again, partials_again)):
            kernel.lamb_moments(fmt, each.part(*tile), lamb_reference.on(work, device), scalars, buffer, scale=there)
    assert adam_cases.same_bits(slots, expected)
    assert torch.equal(partials.cpu(), partials_again.cpu())
    torch.testing.assert_close(partials.cpu(), sums, rtol=1e-6, atol=0)
    given = sums if kernel is lamb_cpu else partials
    for work, tile in zip(works, tiles, strict=True):
        lamb_reference.lamb_apply(fmt, expected.part(*tile), work, ALL_SCALARS, sums, scale=scale)
        for each in (slots, again):
            kernel.lamb_apply(fmt, each.part(*tile), lamb_reference.on(work, device), scalars, given, scale=there)
    assert adam_cases.same_bits(slots, again)
    assert kernel is not lamb_cpu or adam_cases.same_bits(slots, expected)
    for tensor, other in zip(adam_cases.tensors(slots), adam_cases.tensors(expected), strict=True):
        if tensor is not None:
            rtol = 2e-7 if tensor.dtype == FP32 else 0.01
            torch.testing.assert_close(tensor.cpu(), other, rtol=rtol, atol=1e-7)
    untouched = scale.found_inf is not None and bool(scale.found_inf != 0)
    assert adam_cases.same_bits(slots, make_many(fmt)) == untouched
    assert bool((partials == 7).all()) == untouched


def check_empty(kernel: ModuleType, device: str) -> None:
    """No rows, no launch."""
    fmt = ALL_FORMATS["bf16-master"]
    slots = adam_cases.on(make_slots(fmt, NUM_MANY), device)
    (work,) = lamb_work([], [(0, NUM_MANY)])
    lamb_reference.update(kernel, fmt, slots, lamb_reference.on(work, device), ALL_SCALARS.to(device))
    assert adam_cases.same_bits(slots, make_slots(fmt, NUM_MANY))


def _scale(found_inf: float) -> GradScale:
    return GradScale(torch.tensor(0.5), torch.tensor(0.3), torch.tensor(found_inf))


WHOLE = [(0, NUM_MANY)]
CASES: dict[str, Callable[[ModuleType, str], None]] = {
    "fp32": partial(check_agrees, name="fp32", tiles=WHOLE),
    "fp32-tiles": partial(check_agrees, name="fp32", tiles=MANY_TILES, scale=_scale(0.0)),
    "bf16-master": partial(check_agrees, name="bf16-master", tiles=WHOLE, scale=_scale(0.0)),
    "fp16-master": partial(check_agrees, name="fp16-master", tiles=MANY_TILES),
    "found-inf": partial(check_agrees, name="fp32", tiles=WHOLE, scale=_scale(1.0)),
    "found-nan": partial(check_agrees, name="bf16-master", tiles=MANY_TILES, scale=_scale(float("nan"))),
    "empty": check_empty,
}


@pytest.mark.parametrize("name", CASES)
def test_on_the_cpu(name: str) -> None:
    CASES[name](lamb_cpu, "cpu")


def interpreted(name: str) -> None:
    CASES[name](lamb_triton, "cpu")


@pytest.mark.second_tier
@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str) -> None:
    interpret(__file__, name)


@needs_triton
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_on_gpu(name: str) -> None:
    CASES[name](lamb_triton, "cuda")


# ---------------------------------------------------------------- device code: nothing adds atomically, either


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted")
@needs_triton
@pytest.mark.parametrize(
    ("name", "target", "num_tensors"),
    [
        *(pytest.param(name, target, 0, marks=marks) for target, marks in targets_with_marks() for name in FORMATS),
        *(("bf16-master", target, 2) for target in ("sm_70", "sm_90")),
    ],
)
@pytest.mark.parametrize("stage", ["moments", "apply"])
def test_nothing_spills_and_memory_moves_in_vectors(
    stage: str, name: str, target: str, num_tensors: int, tmp_path: Path
) -> None:
    """Of one chunk, or of several tensors, each where it lies."""
    from chunkc.kernels import lamb_triton_kernel

    fmt, moments = FORMATS[name], stage == "moments"
    (work,) = lamb_work([Span(0, ROW, 0)], [(0, ROW)])
    if num_tensors:
        addresses = np.arange(num_tensors)[:, None] * alignment_of(fmt)
        work = lamb_work_of_tensors([Span(number * ROW, (number + 1) * ROW, 0) for number in range(num_tensors)])
        work = replace(work, pointer_offsets=pointer_offsets_of(addresses, fmt))
    arguments = (lamb_triton.moments_arguments if moments else lamb_triton.apply_arguments)(
        fmt, make_slots(fmt, ROW), work, SCALARS, new_partials(work), GradScale(*torch.ones(3).unbind())
    )
    kernel = compile_offline(getattr(lamb_triton_kernel, f"lamb_{stage}_kernel"), arguments, target, tmp_path)
    assert not any(spilled(kernel, tmp_path).values())
    written = [FP32, FP32] if moments else [fmt.param_dtype, *([FP32] if fmt.master else [])]
    assert fewest_accesses([FP32] * 3 + [fmt.grad_dtype] * moments, written) <= vector_accesses(kernel)
    if target == "sm_90":
        assert "atom" not in kernel.asm["ptx"]
        assert "fma" not in kernel.asm["ptx"]
