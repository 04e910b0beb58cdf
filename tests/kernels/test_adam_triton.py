"""The Triton update: its table, its errors, and elements past 2 ** 31. Its bits are in `test_rules`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import adam_cases
import pytest
import torch
from interpreting import interpret, needs_gpu, needs_triton

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.layout import ALIGNMENT_NBYTES
from chunkc.kernels import elementwise_triton, reference
from chunkc.kernels.formats import QUANT_BLOCK, UNIT, GradScale, Span, rounding_key
from chunkc.kernels.hyperparameters import scalar_table

FORMATS = adam_cases.FORMATS
SCALARS = scalar_table(adam_cases.HYPERS)


@needs_triton
def test_a_failing_case_is_reported() -> None:
    with pytest.raises(AssertionError, match="KeyError"):
        interpret(Path(__file__).with_name("test_rules.py"), "no such case")


@needs_triton
@needs_gpu
def test_on_gpu_past_32_bits() -> None:
    fmt, num_elements = FORMATS["bf16-only"], (1 << 31) + 4096
    if torch.cuda.mem_get_info()[0] < num_elements * 9:
        pytest.skip("needs 18 GiB of GPU memory")
    expected = adam_cases.make_slots(fmt, 4000)
    parts = [torch.zeros(num_elements, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    slots = replace(expected, param=parts[0], grad=parts[1], exp_avg=parts[2], exp_avg_sq=parts[3])
    begin, end = (1 << 31) + 16, (1 << 31) + 4016
    for whole, part in zip(parts, adam_cases.tensors(expected)):
        assert part is not None
        whole[begin:end] = part.cuda()
    key = rounding_key(0, 1, 0)
    work = elementwise_triton.work_table([Span(begin, end, 0)], fmt).to("cuda")
    elementwise_triton.update(fmt, slots, work, SCALARS.cuda(), key=key)
    reference.chunk_update(fmt, expected, [Span(0, 4000, 0)], SCALARS, key=key, first_element=begin)
    assert adam_cases.same_bits(slots.part(begin, end), expected)
    assert not slots.param[:4096].any()


def rows_of(name: str, *spans: Span) -> list[list[int]]:
    return elementwise_triton.work_table(spans, FORMATS[name]).rows.tolist()


@pytest.mark.parametrize("name", ["fp32", "fp32-int8-moments"])
def test_rows_cover_runs_once_and_only_ends_are_ragged(name: str) -> None:
    align = FORMATS[name].span_alignment
    spans, at = [], 0
    for group, num_elements in enumerate([1, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 5000, 0, 40]):
        begin = -(-(at + 3) // align) * align
        spans.append(Span(begin, begin + num_elements, group))
        at = begin + num_elements
    rows = rows_of(name, *spans)
    elements = [(element, group) for begin, end, group in rows for element in range(begin, end)]
    assert elements == [(element, run.group) for run in spans for element in range(run.begin, run.end)]
    for begin, end, _ in rows:
        ragged = (begin | end) % UNIT != 0
        assert end - begin <= (elementwise_triton.RAGGED_BLOCK if ragged else elementwise_triton.BLOCK)
        if align > 1:
            assert begin % QUANT_BLOCK == 0
        elif ragged:
            assert end - begin < UNIT
    assert len({tuple(row[:2]) for row in rows}) == len(rows)


def test_tensors_in_chunks_begin_where_vectors_do() -> None:
    """So that only the ends of tensors can be ragged, whatever their dtype."""
    assert ALIGNMENT_NBYTES // 4 % UNIT == 0


def test_rows_of_huge_offsets() -> None:
    num_elements = (1 << 40) + 5
    assert rows_of("fp32", Span(num_elements - 21, num_elements, 0)) == [
        [(1 << 40) - 16, 1 << 40, 0],
        [1 << 40, num_elements, 0],
    ]


def test_arguments_are_checked() -> None:
    fmt, quantised = FORMATS["fp32"], FORMATS["fp32-int8-moments"]
    slots, work = adam_cases.make_slots(fmt, 100), elementwise_triton.work_table([Span(0, 100, 2)], fmt)
    elementwise_triton.launch_arguments(fmt, slots, work, SCALARS)
    for given, message in (
        ((fmt, slots.part(0, 99), work, SCALARS), "work table is for 100 elements and 3 groups"),
        ((fmt, slots, work, SCALARS[:2]), "the scalars 2"),
        ((fmt, slots, work.to("meta"), SCALARS), "on meta, param on cpu"),
        ((fmt, replace(slots, exp_avg=torch.zeros(200)[::2]), work, SCALARS), "exp_avg must be contiguous"),
        ((quantised, adam_cases.make_slots(quantised, 100), work, SCALARS), "not made for int8 moments"),
    ):
        with pytest.raises(ValueError, match=message):
            elementwise_triton.launch_arguments(*given)
    with pytest.raises(ValueError, match="found_inf"):
        elementwise_triton.launch_arguments(fmt, slots, work, SCALARS, scale=GradScale(found_inf=torch.zeros(1)))


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted")
@pytest.mark.parametrize(("has_triton", "message"), [(True, "on the CPU use"), (False, "pip install")])
def test_where_it_cannot_run_the_error_says_what_to_do(
    has_triton: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_triton:
        monkeypatch.setitem(sys.modules, "triton", None)
    fmt = FORMATS["fp32"]
    slots, work = adam_cases.make_slots(fmt, 100), elementwise_triton.work_table([Span(0, 100, 0)], fmt)
    with pytest.raises(UnsupportedError, match=message):
        elementwise_triton.update(fmt, slots, work, SCALARS)
