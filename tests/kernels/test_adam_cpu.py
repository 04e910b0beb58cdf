"""The CPU's update: the same bits on any number of threads, vectorised code, memory, recompilation, overhead."""

from __future__ import annotations

import gc
import mmap
import platform
import re
import shutil
import subprocess
import time
import weakref
from dataclasses import dataclass
from typing import Any

import adam_cases
import pytest
import torch
from adam_cases import assert_same_bits, make_slots, num_threads, on
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode

from chunkc.kernels import cpp, elementwise_cpu, reference
from chunkc.kernels.arithmetic import Arithmetic, Value
from chunkc.kernels.cpp import SERIAL_NUM_ELEMENTS
from chunkc.kernels.cpu_loop import library
from chunkc.kernels.elementwise_cpu import chunk_update, prepare, warm_up_format
from chunkc.kernels.formats import AdamSlots, Span, UpdateFormat, num_quant_blocks, rounding_key
from chunkc.kernels.hyperparameters import AdamHyper, AdamScalars, scalar_table
from chunkc.kernels.pointer_offsets import kinds_of
from chunkc.kernels.quant import midpoints, quantise
from chunkc.kernels.quant_cpu import value_table
from chunkc.runtime.device import cpu_allocator
from chunkc.torch_private.fake import disable_current_modes

FORMATS = adam_cases.FORMATS
FP32, MASTER = FORMATS["fp32"], FORMATS["bf16-master"]
QUICK = {"fp32", "bf16-master-bf16-moments", "bf16-split", "bf16-only", "bf16-only-int8-moments"}
formats = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FORMATS]
)
ADAMW = AdamHyper(lr=1e-2, weight_decay=0.1, step=3)
SCALARS = scalar_table([adam_cases.HYPERS[0], adam_cases.HYPERS[2]])


def update(slots: AdamSlots, hyper: AdamHyper = ADAMW) -> None:
    """Update one span that is the whole tile."""
    with disable_current_modes():
        scalars = scalar_table([hyper])
    chunk_update(MASTER if slots.master is not None else FP32, slots, [Span(0, len(slots.param), 0)], scalars)


def num_compiled() -> int:
    return library.cache_info().misses


@formats
def test_no_number_of_threads_changes_a_bit(name: str) -> None:
    """Of AdamW and of Adam; long enough for threads, with a block of 8-bit moments that is not whole."""
    fmt, num_elements = FORMATS[name], 3 * SERIAL_NUM_ELEMENTS + 77
    expected, scalars = make_slots(fmt, num_elements), scalar_table(adam_cases.HYPERS)
    runs = {number: on(expected, "cpu") for number in (1, 3)}
    for step, group in ((1, 1), (2, 0)):
        options = {"key": adam_cases.key_of(fmt, step)}
        reference.chunk_update(fmt, expected, [Span(0, num_elements, group)], scalars, **options)
        for number, slots in runs.items():
            with num_threads(number):
                chunk_update(fmt, slots, [Span(0, num_elements, group)], scalars, **options)
            assert_same_bits(slots, expected)


@pytest.mark.parametrize("num_elements", [0, 1, 2, 15, 16, 17, 1000])
@pytest.mark.parametrize("offset_nbytes", [64, 68])
def test_slices_of_one_mapped_buffer(num_elements: int, offset_nbytes: int) -> None:
    """All slots in one file-like buffer, aligned or not; the bytes around stay."""
    buffer = torch.frombuffer(mmap.mmap(-1, 1 << 16), dtype=torch.uint8)
    buffer.fill_(0xA5)
    expected, untouched, views = make_slots(MASTER, num_elements), torch.ones_like(buffer, dtype=torch.bool), []
    for place, tensor in enumerate(adam_cases.tensors(expected)[:5]):
        start = offset_nbytes + place * 12 * 1024
        end = start + tensor.nbytes
        views.append(buffer[start:end].view(tensor.dtype).copy_(tensor))
        untouched[start:end] = False
    update(AdamSlots(*views))
    update(expected)
    assert_same_bits(AdamSlots(*views), expected)
    assert (buffer[untouched] == 0xA5).all()


def test_without_the_processors_conversion_fp16_rounds_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on other processors than x86: all elements, and not only the last few."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("this processor's code is the one that is tested everywhere")
    fmt, flags = FORMATS["fp16-master"], (*cpp._FLAGS, "-mno-f16c", "-mno-avx512f")
    expected = adam_cases.with_special_values(make_slots(fmt, 100_003))
    with monkeypatch.context() as patch:
        patch.setattr(cpp, "_FLAGS", flags)
        patch.setattr(elementwise_cpu, "library", library.__wrapped__)
        run = on(expected, "cpu")
        chunk_update(fmt, run, [Span(0, 100_003, 0)], SCALARS)
    reference.chunk_update(fmt, expected, [Span(0, 100_003, 0)], SCALARS)
    assert_same_bits(run, expected)


def test_the_loop_gets_an_address_for_all_that_it_declares_and_tables_live_as_long() -> None:
    """Even if another thread, which makes a table at the same time, replaces it in the cache."""
    fp32 = make_slots(FP32, 10)
    assert len(elementwise_cpu._pointers(FP32, [fp32.param, fp32.grad])) == len(kinds_of(FP32))
    fmt = FORMATS["fp32-int8-moments"]
    pointers = elementwise_cpu._data(fmt, make_slots(fmt, 10))
    table = weakref.ref(value_table(signed=True))
    value_table.cache_clear()
    gc.collect()
    assert table() is not None
    del pointers


def test_compiles_once_for_all_lengths_and_hyper_parameters() -> None:
    library.cache_clear()
    start = num_compiled()
    warm_up_format(FP32)
    compiled = num_compiled()
    assert compiled != start
    for step, num_elements in enumerate([0, 1, 2, 3, 1, 8, 9, 64, 1000, 70_001, 0, 1], start=1):
        hyper = AdamHyper(lr=0.1 / step, weight_decay=0.01 * step, step=step, maximize=step % 2 == 0)
        update(make_slots(FP32, num_elements), hyper)
    update(make_slots(FP32, 10), AdamHyper(lr=0.1, decoupled=False))
    assert num_compiled() == compiled
    update(make_slots(FP32, 10), AdamHyper(lr=1e-2, weight_decay=0.1, step=3, decoupled=False))
    assert num_compiled() != compiled


def test_the_state_of_the_caller_does_not_matter() -> None:
    """Reset, stances, grad and inference modes, fake modes and a Parameter: same bits, no compilation."""
    hyper = AdamHyper(lr=1e-2, step=7)  # a value of its own, so that its scalars are made in here
    warm_up_format(FP32)
    compiled, runs = num_compiled(), [make_slots(FP32, 100) for _ in range(6)]
    with FakeTensorMode():
        update(runs[0], hyper)
    with torch.inference_mode():
        update(runs[1], hyper)
    parameter = adam_cases.tensors(runs[2])
    update(AdamSlots(torch.nn.Parameter(parameter[0]), *parameter[1:]), hyper)
    with torch.compiler.set_stance("fail_on_recompile"):
        update(runs[3], hyper)
    update(runs[4], hyper)
    assert num_compiled() == compiled
    torch._dynamo.reset()
    update(runs[5], hyper)
    for run in runs:
        assert_same_bits(run, runs[4])
    assert not adam_cases.same_bits(runs[4], make_slots(FP32, 100))


def test_compiling_ignores_and_leaves_the_users_settings() -> None:
    expected, run = make_slots(FP32, 1003), make_slots(FP32, 1003)
    update(expected)
    library.cache_clear()
    users = {"cpp.enable_floating_point_contract_flag": "fast", "cpp.threads": 1, "size_asserts": True}
    with inductor_config.patch(users), torch.compiler.set_stance("force_eager"), FakeTensorMode():
        before = inductor_config.get_config_copy()
        update(run)
        assert inductor_config.get_config_copy() == before
    library.cache_clear()
    assert_same_bits(run, expected)


def test_works_inside_a_compiled_function() -> None:
    run, expected = make_slots(FP32, 100), make_slots(FP32, 100)

    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        update(run)
        return x + 1

    assert step(torch.ones(())) == 2
    update(expected)
    assert_same_bits(run, expected)


def test_autograd_notices_the_update() -> None:
    run = make_slots(FP32, 10)
    product = torch.ones(10, requires_grad=True) * run.param
    update(run)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_tiny_call_is_cheap() -> None:
    run, prepared = adam_cases.tensors(make_slots(MASTER, 8))[:5], prepare(MASTER, ADAMW)
    prepared([*run])
    batches_s = []
    for _ in range(20):
        start_s = time.perf_counter()
        for _ in range(50):
            prepared([*run])
        batches_s.append((time.perf_counter() - start_s) / 50)
    assert min(batches_s) < 60e-6


@pytest.mark.parametrize("name", sorted(QUICK | {"bf16-master-from-fp32", "fp16-master"}))
def test_nothing_is_allocated(name):
    fmt = FORMATS[name]
    slots = make_slots(fmt, 3001)
    options = {"scale": adam_cases.SCALE, "key": adam_cases.key_of(fmt)}
    chunk_update(fmt, slots, [Span(0, 3001, 0)], SCALARS, **options)
    cpu_allocator.install()
    before = adam_cases.on(slots, "cpu")
    with cpu_allocator.hard_limit(cpu_allocator.current_nbytes()):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1)
        chunk_update(fmt, slots, [Span(0, 3001, 0)], SCALARS, **options)
    assert not adam_cases.same_bits(slots, before)


@pytest.mark.quick(1)
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
@formats
def test_the_loop_is_vectorised_and_nothing_is_contracted(name: str) -> None:
    loop = library(FORMATS[name], l2=False, scaled=False)
    done = subprocess.run(["objdump", "-d", loop._name], check=True, capture_output=True, text=True)
    assert re.search(r"\bv?sqrtps\b|\bfsqrt\s+[vz]\d", done.stdout)
    assert not re.search(r"\bvfn?m(add|sub)\w*\b|\bfml[as]\b", done.stdout)


def to_gradient(grad: Value, target: Value, exp_avg: Value, s: Any) -> tuple[Value, ...]:
    return grad, grad


def to_gradient_squared(grad: Value, target: Value, exp_avg_sq: Value, s: Any) -> tuple[Value, ...]:
    return grad, grad


@dataclass(frozen=True, slots=True)
class SignedFormat(UpdateFormat):
    """Parameter and first moment become the gradient."""

    arithmetic = Arithmetic(to_gradient, AdamScalars)


@dataclass(frozen=True, slots=True)
class UnsignedFormat(UpdateFormat):
    """Parameter and second moment, which has no sign, become the gradient."""

    arithmetic = Arithmetic(to_gradient_squared, AdamScalars)


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
    fmt = (SignedFormat if signed else UnsignedFormat)(torch.float32, torch.float32, "int8")
    grad, (kind,) = values.flatten(), fmt.kinds
    codes, scales = torch.zeros(len(grad), dtype=torch.uint8), torch.zeros(num_quant_blocks(len(grad)))
    slots = fmt.slots.of({"param": torch.zeros_like(grad), "grad": grad, kind: codes, f"{kind}_scale": scales})
    chunk_update(fmt, slots, [Span(0, len(grad), 0)], SCALARS)
    assert torch.equal(codes, expected_codes)
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)


def test_unsuitable_arguments_are_refused():
    slots = make_slots(FP32, 10)
    meta = adam_cases.on(slots, "meta")
    with pytest.raises(ValueError, match="on the CPU"):
        chunk_update(FP32, meta, [Span(0, 10, 0)], SCALARS.to("meta"))
    with pytest.raises(ValueError, match="spans must be"):
        chunk_update(FP32, slots, [Span(0, 11, 0)], SCALARS)
    with pytest.raises(ValueError, match="key"):
        chunk_update(FP32, slots, [Span(0, 10, 0)], SCALARS, key=rounding_key(0, 1, 0))


def test_warming_up_compiles_all():
    warm_up_format(FP32, scaled=True)
    compiled = num_compiled()
    slots = make_slots(FP32, SERIAL_NUM_ELEMENTS)
    spans = [Span(0, SERIAL_NUM_ELEMENTS, 0)]
    chunk_update(FP32, slots, spans, scalar_table([AdamHyper(lr=0.1)]), scale=adam_cases.SCALE)
    chunk_update(FP32, slots, [Span(0, 5, 0)], SCALARS, scale=adam_cases.SCALE)
    assert num_compiled() == compiled
