"""The CPU passes of every Adam format: the reference's bits, vectorised code, memory, tiles and scales."""

from __future__ import annotations

import adam_cases
import pytest
import torch

from chunkc.kernels import elementwise_cpu, reference
from chunkc.kernels.cpu_pass import UpdatePass, rounding_words, update_pass
from chunkc.kernels.formats import QUANT_BLOCK, Span, rounding_key
from chunkc.kernels.fused_pass import SERIAL_NUM_ELEMENTS, compile_pass
from chunkc.kernels.hyperparameters import AdamHyper, scalar_table
from chunkc.kernels.quant import midpoints, quantise
from chunkc.kernels.quant_cpu import bucket_table, quantise_pass
from chunkc.kernels.rounding import mix32, random_bits16
from chunkc.runtime.device import cpu_allocator

FORMATS = adam_cases.FORMATS
QUICK = {"fp32", "bf16-master-bf16-moments", "bf16-split", "bf16-only", "bf16-only-int8-moments"}
formats = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FORMATS]
)
ADAMW = scalar_table([adam_cases.HYPERS[0], adam_cases.HYPERS[2]])


CASES = [case for case in adam_cases.CASES if case.startswith("agrees:") or case.partition(":")[2] in QUICK]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.partition(":")[2] in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_on_the_cpu(case):
    adam_cases.CASES[case](adam_cases.BY_CPU)


@pytest.mark.slow
@formats
def test_l2_and_long_spans(name):
    """Adam's weight decay, maximize, no scale; long enough for threads, and for several pieces of 8-bit blocks."""
    fmt = FORMATS[name]
    num_elements = 5 * SERIAL_NUM_ELEMENTS + 77
    expected = adam_cases.make_slots(fmt, num_elements)
    slots = adam_cases.on(expected, "cpu")
    scalars = scalar_table(adam_cases.HYPERS)
    for step, group in ((1, 1), (2, 0)):
        options = {"key": adam_cases.key_of(fmt, step)}
        reference.chunk_update(fmt, expected, [Span(0, num_elements, group)], scalars, **options)
        elementwise_cpu.chunk_update(fmt, slots, [Span(0, num_elements, group)], scalars, **options)
        assert adam_cases.same_bits(slots, expected), f"step {step}"


@pytest.mark.parametrize("name", sorted(QUICK | {"bf16-master-from-fp32", "fp16-master"}))
def test_nothing_is_allocated(name):
    fmt = FORMATS[name]
    slots = adam_cases.make_slots(fmt, 3001)
    options = {"scale": adam_cases.SCALE, "key": adam_cases.key_of(fmt)}
    elementwise_cpu.chunk_update(fmt, slots, [Span(0, 3001, 0)], ADAMW, **options)
    cpu_allocator.install()
    before = adam_cases.on(slots, "cpu")
    # The quantising pass has room for one number of each block.
    room_nbytes = 2 * 64 * -(-3001 // QUANT_BLOCK) if fmt.quantised else 0
    with cpu_allocator.hard_limit(cpu_allocator.current_nbytes() + room_nbytes):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(room_nbytes + 1)
        elementwise_cpu.chunk_update(fmt, slots, [Span(0, 3001, 0)], ADAMW, **options)
    assert not adam_cases.same_bits(slots, before)


def stores_of(code: str) -> list[str]:
    kernel = code[code.index("extern") : code.index("class Runner")]
    return [line for line in kernel.splitlines() if "out_ptr" in line and ("store(" in line or "] = " in line)]


@pytest.mark.quick(1)
@formats
def test_the_code_is_vectorised(name):
    """Every store is a vector's, arithmetic is on vectors, there is one loop, and no memory but the arguments'."""
    fmt = FORMATS[name]
    code = update_pass(UpdatePass(fmt, l2=False, scaled=True, parallel=False)).source_code
    kernel = code[code.index("extern") : code.index("class Runner")]
    num_stored = 4 if fmt.master else 3
    assert len(stores_of(code)) in (num_stored, 2 * num_stored)  # in whole vectors, and at the end
    assert all(".store(" in line for line in stores_of(code))
    assert kernel.count("at::vec::Vectorized") > 10
    assert kernel.count("for(int64_t x0") == 1
    assert "empty_strided_cpu(" not in code[code.index("def call") : code.index("def get_args")]
    assert "omp parallel" not in kernel
    assert "omp parallel" in update_pass(UpdatePass(fmt, l2=False, scaled=True, parallel=True)).source_code


def test_code_that_is_not_vectorised_is_found():
    """Inductor has no vectors of int16."""

    def increment(values: torch.Tensor) -> tuple[()]:
        values.copy_(values + 1)
        return ()

    (store,) = stores_of(compile_pass(increment, [(torch.int16, ())], [], parallel=False).source_code)
    assert ".store(" not in store


@pytest.mark.parametrize("signed", [True, False])
def test_quantising_by_table_is_quantising_by_search(signed):
    """All values around all limits, special ones, and blocks of zeros, infinity and NaN."""
    limits = torch.tensor(midpoints(signed=signed))
    around = torch.cat([limits, limits.nextafter(torch.tensor(2.0)), limits.nextafter(torch.tensor(-2.0))])
    values = torch.cat([around, -around, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-8, 2.0**-23, -(2.0**-23)])])
    values = torch.cat([values, torch.randn(20_000, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)])
    values = torch.nn.functional.pad(values, (0, -len(values) % 255)).view(-1, 255)
    values = torch.cat([values, torch.ones(len(values), 1)], 1)  # a scale of 1, so that quotients are the values
    special = torch.zeros(4, 256)
    special[1, 3], special[2, 5], special[3] = float("inf"), float("nan"), 1e-42
    values = torch.cat([values, special, torch.randn(50, 256) * 1e-6])
    values = values if signed else values.abs()
    expected_codes, expected_scales = quantise(values.flatten(), signed=signed)
    codes, scales = torch.empty(values.shape, dtype=torch.uint8), torch.empty(len(values))
    quantise_pass(False)([values, codes, scales, bucket_table(signed=signed)])
    assert torch.equal(codes.flatten(), expected_codes)
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)


def test_random_bits_in_32_bits():
    """What the pass does with `rounding_words`, followed in 64-bit integers."""
    key = rounding_key(3, 4, 5)
    for first in (0, 7, (1 << 32) - 3, (123 << 32) + 5):
        words = (rounding_words(key, first).to(torch.int64) & 0xFFFFFFFF).tolist()
        for stream in range(3):
            expected = random_bits16(torch.tensor([first]), key, stream)
            scattered = mix32(torch.tensor([words[0] ^ words[1]]))
            assert torch.equal(mix32(scattered + words[2 + stream] & 0xFFFFFFFF) & 0xFFFF, expected)


def test_unsuitable_arguments_are_refused():
    fmt = FORMATS["fp32"]
    slots = adam_cases.make_slots(fmt, 10)
    meta = adam_cases.on(slots, "meta")
    with pytest.raises(ValueError, match="on the CPU"):
        elementwise_cpu.chunk_update(fmt, meta, [Span(0, 10, 0)], ADAMW.to("meta"))
    with pytest.raises(ValueError, match="spans must be"):
        elementwise_cpu.chunk_update(fmt, slots, [Span(0, 11, 0)], ADAMW)
    with pytest.raises(ValueError, match="key"):
        elementwise_cpu.chunk_update(fmt, slots, [Span(0, 10, 0)], ADAMW, key=rounding_key(0, 1, 0))


def test_warming_up_compiles_all():
    fmt = FORMATS["fp32"]
    elementwise_cpu.warm_up_format(fmt, scaled=True)
    num_passes = update_pass.cache_info().currsize
    slots = adam_cases.make_slots(fmt, SERIAL_NUM_ELEMENTS)
    spans = [Span(0, SERIAL_NUM_ELEMENTS, 0)]
    elementwise_cpu.chunk_update(fmt, slots, spans, scalar_table([AdamHyper(lr=0.1)]), scale=adam_cases.SCALE)
    elementwise_cpu.chunk_update(fmt, slots, [Span(0, 5, 0)], ADAMW, scale=adam_cases.SCALE)
    assert update_pass.cache_info().currsize == num_passes
