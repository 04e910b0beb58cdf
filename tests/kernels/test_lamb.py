"""LAMB on the CPU and by Triton: tensors across tiles, scales, bits, tables. The formula is in `optim/test_lamb`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import adam_cases
import numpy as np
import pytest
import torch
from interpreting import interpret, needs_gpu, needs_triton
from lamb_reference import BY_TRITON, NUM_SCALARS, ON_CPU, REFERENCE, Kernel
from offline import compile_offline, fewest_accesses, spilled, targets_with_marks, vector_accesses

from chunkc.ir.errors import UnsupportedError
from chunkc.kernels import elementwise_cpu, elementwise_triton
from chunkc.kernels.cpu_loop import library
from chunkc.kernels.formats import NO_SCALE, AdamSlots, GradScale
from chunkc.kernels.hyperparameters import scalar_table
from chunkc.kernels.lamb import LambHyper, LambMomentsFormat
from chunkc.kernels.pointer_offsets import alignment_of, pointer_offsets_of
from chunkc.kernels.summed_work import ROW, SummedWork, summed_work, summed_work_of_tensors
from chunkc.runtime.device import cpu_allocator

FP32, BF16 = torch.float32, torch.bfloat16
FORMATS = {"fp32": LambMomentsFormat(FP32, FP32), "bf16-master": LambMomentsFormat(BF16, BF16, master=True)}
ADAPTED = LambHyper(lr=1e-2, weight_decay=0.1, step=3)
PLAIN = LambHyper(lr=1e-2, step=3, adapt=False)
NUM_ELEMENTS = 5 * ROW + 300
TENSORS = [(0, 100), (128, 4 * ROW + 5), (4 * ROW + 16, 4 * ROW + 21), (5 * ROW, 5 * ROW + 300)]
SCALARS = scalar_table([ADAPTED, ADAPTED, PLAIN, ADAPTED])


def make_slots(fmt: Any, num_elements: int = NUM_ELEMENTS, seed: int = 0) -> AdamSlots:
    return adam_cases.make_slots(fmt, num_elements, seed)


def on(work: SummedWork, device: torch.device | str) -> SummedWork:
    """The same work on another device."""
    return work.sent(lambda tensor: tensor.to(device))


def test_no_number_of_threads_changes_a_bit():
    fmt = FORMATS["fp32"]
    one, many = make_slots(fmt), make_slots(fmt)
    work = summed_work(TENSORS, [(0, NUM_ELEMENTS)], NUM_SCALARS)
    for slots, number in ((one, 1), (many, 3)):
        with adam_cases.num_threads(number):
            ON_CPU.update(fmt, slots, work, SCALARS)
    assert adam_cases.same_bits(one, many)


def test_little_is_allocated():
    """Only the sums: a few bytes for each row and tensor."""
    fmt = FORMATS["bf16-master"]
    library(fmt, l2=False, scaled=False)
    elementwise_cpu.warm_up_format(fmt.second)
    cpu_allocator.install()
    slots = make_slots(fmt)
    work = summed_work(TENSORS, [(0, NUM_ELEMENTS)], NUM_SCALARS)
    before = adam_cases.on(slots, "cpu")
    with cpu_allocator.hard_limit(cpu_allocator.current_nbytes() + 4096):
        ON_CPU.update(fmt, slots, work, SCALARS)
    assert not torch.equal(slots.param, before.param)


@pytest.mark.parametrize(
    ("tensors", "tiles", "message"),
    [
        ([(5, 9), (8, 10)], [(0, 10)], "spans must be in order"),
        ([(5, 4)], [(0, 10)], "spans must be in order"),
        ([(0, 4)], [(0, 3), (2, 10)], "tiles must be in order"),
        ([(0, 4)], [(0, 3)], "lie in none of the tiles"),
        ([(0, 4)], [(1, 4)], "lie in none of the tiles"),
        ([(0, 4), (6, 8)], [(0, 4), (7, 8)], "lie in none of the tiles"),
    ],
)
def test_unsuitable_tables_are_refused(tensors, tiles, message):
    with pytest.raises(ValueError, match=message):
        summed_work(tensors, tiles, NUM_SCALARS)


def test_rows_of_a_tensor_are_those_of_any_tiles():
    """Cut at multiples of `ROW`, and numbered tensor by tensor."""
    tensors = [(0, 20), (32, 32), (48, 3 * ROW + 5)]
    whole = summed_work(tensors, [(0, 4 * ROW)], NUM_SCALARS)
    tiles = summed_work(tensors, [(0, ROW), (ROW, 3 * ROW), (3 * ROW, 4 * ROW)], NUM_SCALARS)
    starts = [0, ROW, 3 * ROW]
    rows = [(b + at, e + at, s) for at, table in zip(starts, tiles.tables) for b, e, s in table.rows.tolist()]
    assert rows == [tuple(row) for row in whole.tables[0].rows.tolist()]
    assert [end for _, end, span in rows if span == 2] == [ROW, 2 * ROW, 3 * ROW, 3 * ROW + 5]
    assert torch.equal(tiles.totals, whole.totals)
    last = len(rows)
    assert whole.totals[:, :2].tolist() == [
        [first + begin, first + end] for first in (0, last) for begin, end in ((0, 2), (2, 2), (2, last))
    ]
    assert whole.totals[:, 2].tolist() == [NUM_SCALARS * n + at for at in (-2, -1) for n in (1, 2, 3)]


def test_unsuitable_arguments_are_refused():
    fmt = FORMATS["fp32"]
    slots = make_slots(fmt, 10)
    work = summed_work([(0, 10)], [(0, 10)], NUM_SCALARS)
    (table,), sums = work.tables, work.new_sums()
    for update in (elementwise_cpu.summed_update, partial(_by_triton)):
        for wrong, message in (
            ((fmt, make_slots(fmt, 9), table, SCALARS, sums), "work table is for 10 elements"),
            ((fmt, slots, table, SCALARS[:0], sums), "the scalars 0"),
            ((fmt, slots, table, SCALARS[:, :5], sums), "scalars must be"),
            ((fmt, slots, table, SCALARS, sums[:, :0]), "sums of terms must be"),
            ((fmt.second, slots, table, SCALARS, sums), "sums are not wanted"),
            ((FORMATS["bf16-master"], slots, table, SCALARS, sums), "param must be"),
        ):
            with pytest.raises(ValueError, match=message):
                update(*wrong)
    with pytest.raises(ValueError, match="sums are missing"):
        elementwise_triton.launch_arguments(fmt, slots, table, SCALARS)
    several = summed_work_of_tensors([(0, 10)], NUM_SCALARS)
    with pytest.raises(ValueError, match="of several tensors"):
        elementwise_triton.launch_arguments(fmt, slots, several.tables[0], SCALARS, sums=sums)
    for options in ({"moments": "bfloat16"}, {"moments": "int8"}, {"moments": "bfloat16", "rounding": "stochastic"}):
        with pytest.raises(ValueError, match="an update in stages needs"):
            LambMomentsFormat(FP32, FP32, **options)


def _by_triton(fmt: Any, slots: Any, table: Any, scalars: Any, sums: Any) -> None:
    elementwise_triton.update(fmt, slots, table, scalars, sums=sums)


@pytest.mark.parametrize(
    ("kernel", "device", "error", "message"),
    [
        (ON_CPU, "meta", ValueError, "on the CPU"),
        pytest.param(BY_TRITON, "cpu", UnsupportedError, "elementwise_cpu", marks=needs_triton),
    ],
)
def test_other_devices_are_refused(kernel, device, error, message):
    fmt = FORMATS["fp32"]
    slots = adam_cases.on(make_slots(fmt, 10), device)
    work = on(summed_work([(0, 10)], [(0, 10)], NUM_SCALARS), device)
    with pytest.raises(error, match=message):
        kernel.first(fmt, slots, work, 0, SCALARS.to(device), work.new_sums())


# ---------------------------------------------------------------- the CPU and Triton beside the reference

ALL_FORMATS = FORMATS | {
    "fp16-master": LambMomentsFormat(torch.float16, FP32, master=True),
    "bf16-master-from-fp32": LambMomentsFormat(BF16, FP32, master=True),
}
NUM_MANY = 2 * ROW + 4000
MANY_TENSORS = [
    (0, 100),
    (128, ROW + 2005),
    (ROW + 2009, ROW + 2021),
    (2 * ROW - 7, NUM_MANY - 300),
    (NUM_MANY - 288, NUM_MANY - 100),
    (NUM_MANY - 64, NUM_MANY),
]
MANY_SCALARS = scalar_table(
    [
        LambHyper(1e-2, weight_decay=0.1, step=3, min_coeff=3.0),
        LambHyper(1e-2, weight_decay=0.1, step=3),
        LambHyper(1e-2, beta1=0.4, step=2, maximize=True),
        LambHyper(1e-2, weight_decay=0.1, step=3, max_coeff=0.3),
        PLAIN,
        LambHyper(1e-2, weight_decay=0.1, step=3),
    ]
)
MANY_TILES = [(0, 300), (300, 300 + 5), (305, ROW), (ROW, NUM_MANY)]


def make_many(fmt: LambMomentsFormat) -> AdamSlots:
    """Slots of several tensors: one without gradient, whose moments begin, and one of zeros."""
    slots = make_slots(fmt, NUM_MANY)
    adam_cases.target_of(fmt, slots)[-64:] = 0  # type: ignore[arg-type]
    for tensor in (slots.grad, slots.exp_avg, slots.exp_avg_sq):
        tensor[ROW + 2009 : ROW + 2021] = 0
    return slots


def check_agrees(
    kernel: Kernel, device: str, name: str, tiles: list[tuple[int, int]], scale: GradScale = NO_SCALE
) -> None:
    """Moments and, on the CPU from the same sums, parameters have the reference's bits; sums are right, and the same
    each time."""
    fmt = ALL_FORMATS[name]
    expected = make_many(fmt)
    slots, again = (adam_cases.on(expected, device) for _ in range(2))
    work = summed_work(MANY_TENSORS, tiles, NUM_SCALARS)
    there = on(work, device)
    sums, found, found_again = (each.new_sums().zero_() for each in (work, there, there))
    wanted, scalars, scalars_again = MANY_SCALARS.clone(), *(MANY_SCALARS.to(device, copy=True) for _ in range(2))
    scales = GradScale(*[None if t is None else t.to(device) for t in (scale.unscale, scale.clip, scale.found_inf)])
    for number, tile in enumerate(tiles):
        REFERENCE.first(fmt, expected.part(*tile), work, number, wanted, sums, scale=scale)
        for each, buffer in ((slots, found), (again, found_again)):
            kernel.first(fmt, each.part(*tile), there, number, scalars, buffer, scale=scales)
    untouched = scale.found_inf is not None and bool(scale.found_inf != 0)
    assert adam_cases.same_bits(slots, expected)
    assert torch.equal(found.cpu(), found_again.cpu())
    assert untouched or torch.testing.assert_close(found.cpu(), sums, rtol=1e-6, atol=0) is None
    REFERENCE.totals(work, sums, wanted)
    kernel.totals(there, sums if kernel is ON_CPU else found, scalars)
    kernel.totals(there, sums if kernel is ON_CPU else found_again, scalars_again)
    for number, tile in enumerate(tiles):
        REFERENCE.second(fmt, expected.part(*tile), work, number, wanted, scale=scale)
        for each, table in ((slots, scalars), (again, scalars_again)):
            kernel.second(fmt, each.part(*tile), there, number, table, scale=scales)
    assert adam_cases.same_bits(slots, again)
    assert kernel is not ON_CPU or adam_cases.same_bits(slots, expected)
    for tensor, other in zip(adam_cases.tensors(slots), adam_cases.tensors(expected), strict=True):
        if tensor is not None:
            rtol = 2e-7 if tensor.dtype == FP32 else 0.01
            torch.testing.assert_close(tensor.cpu(), other, rtol=rtol, atol=1e-7)
    assert adam_cases.same_bits(slots, make_many(fmt)) == untouched


def check_empty(kernel: Kernel, device: str) -> None:
    """No rows, no launch."""
    fmt = ALL_FORMATS["bf16-master"]
    slots = adam_cases.on(make_slots(fmt, NUM_MANY), device)
    work = on(summed_work([], [(0, NUM_MANY)], NUM_SCALARS), device)
    kernel.update(fmt, slots, work, MANY_SCALARS.to(device))
    assert adam_cases.same_bits(slots, make_slots(fmt, NUM_MANY))


def _scale(found_inf: float) -> GradScale:
    return GradScale(torch.tensor(0.5), torch.tensor(0.3), torch.tensor(found_inf))


WHOLE = [(0, NUM_MANY)]
CASES: dict[str, Callable[[Kernel, str], None]] = {
    "fp32": partial(check_agrees, name="fp32", tiles=WHOLE),
    "fp32-tiles": partial(check_agrees, name="fp32", tiles=MANY_TILES, scale=_scale(0.0)),
    "bf16-master": partial(check_agrees, name="bf16-master", tiles=WHOLE, scale=_scale(0.0)),
    "bf16-master-from-fp32": partial(check_agrees, name="bf16-master-from-fp32", tiles=MANY_TILES),
    "fp16-master": partial(check_agrees, name="fp16-master", tiles=MANY_TILES),
    "found-inf": partial(check_agrees, name="fp32", tiles=WHOLE, scale=_scale(1.0)),
    "found-nan": partial(check_agrees, name="bf16-master", tiles=MANY_TILES, scale=_scale(float("nan"))),
    "empty": check_empty,
}


@pytest.mark.parametrize("name", CASES)
def test_on_the_cpu(name: str) -> None:
    CASES[name](ON_CPU, "cpu")


def interpreted(name: str) -> None:
    CASES[name](BY_TRITON, "cpu")


@pytest.mark.second_tier
@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name: str) -> None:
    interpret(__file__, name)


@needs_triton
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_on_gpu(name: str) -> None:
    CASES[name](BY_TRITON, "cuda")


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
    from chunkc.kernels.elementwise_triton_kernel import elementwise_kernel

    moments = stage == "moments"
    fmt = FORMATS[name] if moments else FORMATS[name].second
    work, pointer_offsets = summed_work([(0, ROW)], [(0, ROW)], NUM_SCALARS), None
    if num_tensors:
        work = summed_work_of_tensors([(at * ROW, (at + 1) * ROW) for at in range(num_tensors)], NUM_SCALARS)
        pointer_offsets = pointer_offsets_of(np.arange(num_tensors)[:, None] * alignment_of(fmt), fmt)
    arguments = elementwise_triton.launch_arguments(
        fmt,
        make_slots(fmt, ROW),
        work.tables[0],
        SCALARS,
        scale=GradScale(*torch.ones(3).unbind()),
        pointer_offsets=pointer_offsets,
        sums=work.new_sums() if moments else None,
    )
    arguments["ARITHMETIC"] = fmt.arithmetic.in_triton
    kernel = compile_offline(elementwise_kernel, arguments, target, tmp_path)
    assert not any(spilled(kernel, tmp_path).values())
    written = [FP32, FP32] if moments else [fmt.param_dtype, *([FP32] if fmt.master else [])]
    wanted = fewest_accesses([FP32] * 3 + [fmt.grad_dtype] * moments, written)
    assert wanted <= vector_accesses(kernel)
    if target == "sm_90":
        assert wanted == vector_accesses(kernel)  # what a stage leaves alone is neither read nor written
        assert "atom" not in kernel.asm["ptx"]
        assert "fma" not in kernel.asm["ptx"]
