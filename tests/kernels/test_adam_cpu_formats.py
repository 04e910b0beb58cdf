"""The CPU passes of every Adam format: the reference's bits, vectorised code, memory, tiles and scales."""

from __future__ import annotations

import itertools
from dataclasses import replace

import adam_cases
import pytest
import torch

from chunkc.kernels import elementwise_cpu, reference
from chunkc.kernels.cpu_pass import UpdatePass, rounding_words, update_pass
from chunkc.kernels.formats import QUANT_BLOCK, GradScale, Span, rounding_key
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
ONE_SCALE = GradScale(torch.tensor(0.5), torch.tensor(0.7), torch.tensor(0.0))


def key_of(name: str, step: int = 1):
    return rounding_key(seed=9, step=step, chunk=4) if FORMATS[name].stochastic else None


@formats
def test_has_the_reference_s_bits(name):
    """Ragged spans, gaps, special values and scales, three steps; the 32 lower bits of an index wrap in the last."""
    fmt = FORMATS[name]
    expected = adam_cases.with_special_values(adam_cases.make_slots(fmt, 4000, seed=1))
    slots = adam_cases.on(expected, "cpu")
    spans = [Span(0, 203, 0), Span(768, 1040, 1), Span(1280, 3583, 1), Span(3584, 4000, 0)]
    for step, first_element in ((1, 0), (2, 5 << 32), (3, (1 << 32) - 2048)):
        options = {"scale": ONE_SCALE, "key": key_of(name, step), "first_element": first_element}
        reference.chunk_update(fmt, expected, spans, ADAMW, **options)
        elementwise_cpu.chunk_update(fmt, slots, spans, ADAMW, **options)
        assert adam_cases.same_bits(slots, expected), f"step {step}"
    assert not adam_cases.same_bits(slots, adam_cases.make_slots(fmt, 4000, seed=1))


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
        options = {"key": key_of(name, step)}
        reference.chunk_update(fmt, expected, [Span(0, num_elements, group)], scalars, **options)
        elementwise_cpu.chunk_update(fmt, slots, [Span(0, num_elements, group)], scalars, **options)
        assert adam_cases.same_bits(slots, expected), f"step {step}"


@pytest.mark.parametrize("name", sorted(QUICK))
def test_found_inf_changes_nothing(name):
    slots = adam_cases.make_slots(FORMATS[name], 1000)
    for found_inf in (1.0, float("nan")):
        scale = replace(ONE_SCALE, found_inf=torch.tensor(found_inf))
        run = Span(0, 1000, 0)
        elementwise_cpu.chunk_update(FORMATS[name], slots, [run], ADAMW, scale=scale, key=key_of(name))
        assert adam_cases.same_bits(slots, adam_cases.make_slots(FORMATS[name], 1000))


@pytest.mark.parametrize("name", sorted(QUICK))
def test_tiles_do_not_change_a_bit(name):
    fmt = FORMATS[name]
    whole = adam_cases.with_special_values(adam_cases.make_slots(fmt, 5000))
    tiles = adam_cases.on(whole, "cpu")
    options = {"scale": ONE_SCALE, "key": key_of(name)}
    elementwise_cpu.chunk_update(fmt, whole, [Span(0, 5000, 0)], ADAMW, **options)
    cuts = [0, 512, 768, 3328, 5000] if fmt.quantised else [0, 1, 18, 500, 1536, 3001, 5000]
    for begin, end in itertools.pairwise(cuts):
        run, part = Span(0, end - begin, 0), tiles.part(begin, end)
        elementwise_cpu.chunk_update(fmt, part, [run], ADAMW, first_element=begin, **options)
    assert adam_cases.same_bits(whole, tiles)


@pytest.mark.parametrize("name", sorted(QUICK))
def test_gradient_may_lie_in_the_parameter(name):
    fmt = FORMATS[name]
    apart = adam_cases.make_slots(fmt, 3000)
    apart.param.copy_(apart.grad) if fmt.master else apart.grad.copy_(apart.param)
    shared = adam_cases.on(apart, "cpu")
    shared = replace(shared, grad=shared.param)
    for slots in (apart, shared):
        options = {"scale": ONE_SCALE, "key": key_of(name)}
        elementwise_cpu.chunk_update(fmt, slots, [Span(0, 3000, 0)], ADAMW, **options)
    assert adam_cases.same_bits(shared, replace(apart, grad=apart.param))


@pytest.mark.parametrize("name", sorted(QUICK))
def test_nothing_is_allocated(name):
    fmt = FORMATS[name]
    slots = adam_cases.make_slots(fmt, 3001)
    options = {"scale": ONE_SCALE, "key": key_of(name)}
    elementwise_cpu.chunk_update(fmt, slots, [Span(0, 3001, 0)], ADAMW, **options)
    cpu_allocator.install()
    before = adam_cases.on(slots, "cpu")
    # The quantising pass has room for one number of each block.
    room_nbytes = 2 * 64 * -(-3001 // QUANT_BLOCK) if fmt.quantised else 0
    with cpu_allocator.hard_limit(cpu_allocator.current_nbytes() + room_nbytes):
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
    elementwise_cpu.chunk_update(fmt, slots, spans, scalar_table([AdamHyper(lr=0.1)]), scale=ONE_SCALE)
    elementwise_cpu.chunk_update(fmt, slots, [Span(0, 5, 0)], ADAMW, scale=ONE_SCALE)
    assert update_pass.cache_info().currsize == num_passes
