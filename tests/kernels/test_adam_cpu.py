"""The fused CPU update: accuracy, bits that do not depend on the cut, memory, recompilation, overhead."""

from __future__ import annotations

import mmap
import time
from collections import Counter

import adam_cases
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode

from chunkc.kernels.cpu_pass import update_pass
from chunkc.kernels.elementwise_cpu import chunk_update, prepare, warm_up_format
from chunkc.kernels.formats import AdamFormat, AdamSlots, Span
from chunkc.kernels.hyperparameters import AdamHyper, scalar_table
from chunkc.torch_private.fake import disable_current_modes

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ADAMW = AdamHyper(lr=1e-2, weight_decay=0.1, step=3)
ADAM_L2 = AdamHyper(lr=1e-2, weight_decay=0.1, step=3, decoupled=False)
Run = list[Tensor | None]


def format_of(dtype: torch.dtype) -> AdamFormat:
    return adam_cases.FORMATS["fp32" if dtype == FP32 else "bf16-master"]


def cpu_update(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None, hyper: AdamHyper
) -> None:
    """The update of one span that is the whole tile."""
    with disable_current_modes():
        scalars = scalar_table([hyper])
    slots = AdamSlots(param, grad, exp_avg, exp_avg_sq, master)
    fmt = AdamFormat(param.dtype, grad.dtype, master=master is not None)
    chunk_update(fmt, slots, [Span(0, len(param), 0)], scalars)


def make_run(num_elements: int, dtype: torch.dtype = FP32) -> Run:
    """[param, grad, exp_avg, exp_avg_sq, master] as some training step leaves them."""
    return adam_cases.tensors(adam_cases.make_slots(format_of(dtype), num_elements))[:5]


def clone(run: Run) -> Run:
    return [None if tensor is None else tensor.clone() for tensor in run]


def assert_same_bits(run: Run, other: Run) -> None:
    assert adam_cases.same_bits(AdamSlots(*run), AdamSlots(*other))


def num_compiled() -> Counter[str]:
    """What Inductor and Dynamo count per compilation, cache hits too."""
    return Counter({f"{group}.{name}": n for group in ("inductor", "stats") for name, n in counters[group].items()})


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_copies_are_rounded_as_torch_rounds(dtype):
    """With lr = 0 and no decay the master stays, so each copy must equal `master.to(dtype)` exactly."""
    for high in range(0, 1 << 16, 1 << 13):
        low_halves = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
        patterns = (torch.arange(high, high + (1 << 13)).unsqueeze(1) << 16) + low_halves
        master = patterns.flatten().to(torch.int32).view(FP32)
        finite = master[master.isfinite()]
        param, zeros = torch.empty_like(finite, dtype=dtype), torch.zeros_like(finite)
        cpu_update(param, zeros, zeros.clone(), zeros.clone(), finite, AdamHyper(lr=0.0))
        assert torch.equal(param, finite.to(dtype))


def test_bits_do_not_depend_on_the_number_of_threads():
    one, many = make_run(100_003, BF16), make_run(100_003, BF16)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        cpu_update(*one, ADAMW)
        torch.set_num_threads(3)
        cpu_update(*many, ADAMW)
    finally:
        torch.set_num_threads(num_threads)
    assert_same_bits(one, many)


@pytest.mark.parametrize("num_elements", [0, 1, 2, 15, 16, 17, 1000])
def test_slices_of_one_mapped_buffer(num_elements):
    """All tensors of a run in one file-like buffer, at 64-byte offsets; the bytes around stay."""
    buffer = torch.frombuffer(mmap.mmap(-1, 1 << 16), dtype=torch.uint8)
    buffer.fill_(0xA5)
    expected = make_run(num_elements, BF16)
    run, untouched = [], torch.ones_like(buffer, dtype=torch.bool)
    for place, tensor in enumerate(expected):
        start = 64 + place * 12 * 1024
        end = start + tensor.nbytes
        view = buffer[start:end].view(tensor.dtype)
        view.copy_(tensor)
        untouched[start:end] = False
        run.append(view)
    cpu_update(*run, ADAMW)
    cpu_update(*expected, ADAMW)
    assert_same_bits(run, expected)
    assert (buffer[untouched] == 0xA5).all()


@pytest.mark.parametrize("offset", [1, 3])
def test_offsets_need_no_alignment(offset):
    expected = make_run(333)
    run = [None if t is None else torch.cat([torch.zeros(offset), t])[offset:] for t in expected]
    cpu_update(*run, ADAMW)
    cpu_update(*expected, ADAMW)
    assert_same_bits(run, expected)


def test_compiles_once_for_all_lengths_and_hyper_parameters():
    update_pass.cache_clear()
    start = num_compiled()
    warm_up_format(format_of(FP32))
    compiled = num_compiled()
    assert compiled != start
    for step, num_elements in enumerate([0, 1, 2, 3, 1, 8, 9, 64, 1000, 70_001, 0, 1], start=1):
        hyper = AdamHyper(lr=0.1 / step, weight_decay=0.01 * step, step=step, maximize=step % 2 == 0)
        cpu_update(*make_run(num_elements), hyper)
    cpu_update(*make_run(10), AdamHyper(lr=0.1, decoupled=False))
    assert num_compiled() == compiled
    cpu_update(*make_run(10), ADAM_L2)
    assert num_compiled() != compiled


def test_the_state_of_the_caller_does_not_matter():
    """Reset, stances, grad and inference modes, fake modes and a Parameter: same bits, no compilation."""
    hyper = AdamHyper(lr=1e-2, step=7)  # a value of its own, so that its scalars are made in here
    initial, expected = make_run(100), make_run(100)
    warm_up_format(format_of(FP32))
    compiled = num_compiled()
    faked = clone(initial)
    with FakeTensorMode():
        cpu_update(*faked, hyper)
    cpu_update(*expected, hyper)
    assert_same_bits(faked, expected)

    inferred = clone(initial)
    with torch.inference_mode():
        cpu_update(*inferred, hyper)
    parameter = clone(initial)
    parameter[0] = torch.nn.Parameter(parameter[0])
    cpu_update(*parameter, hyper)
    stanced = clone(initial)
    with torch.compiler.set_stance("fail_on_recompile"):
        cpu_update(*stanced, hyper)
    compiled_after = num_compiled()
    torch._dynamo.reset()
    after_reset = clone(initial)
    cpu_update(*after_reset, hyper)
    assert compiled_after == compiled
    for run in (inferred, stanced, after_reset, [parameter[0].detach(), *parameter[1:]]):
        assert_same_bits(run, expected)


def test_compiling_ignores_and_leaves_the_users_settings():
    expected, run = make_run(1003), make_run(1003)
    cpu_update(*expected, ADAMW)
    update_pass.cache_clear()
    users = {"cpp.enable_floating_point_contract_flag": "fast", "cpp.threads": 1, "size_asserts": True}
    with inductor_config.patch(users), torch.compiler.set_stance("force_eager"), FakeTensorMode():
        before = inductor_config.get_config_copy()
        cpu_update(*run, ADAMW)
        assert inductor_config.get_config_copy() == before
    update_pass.cache_clear()
    assert_same_bits(run, expected)


def test_works_inside_a_compiled_function():
    run, expected = make_run(100), make_run(100)

    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        cpu_update(*run, ADAMW)
        return x + 1

    assert step(torch.ones(())) == 2
    cpu_update(*expected, ADAMW)
    assert_same_bits(run, expected)


def test_autograd_notices_the_update():
    run = make_run(10)
    weight = torch.ones(10, requires_grad=True)
    product = weight * run[0]
    cpu_update(*run, ADAMW)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_tiny_call_is_cheap():
    run, update = make_run(8, BF16), prepare(format_of(BF16), ADAMW)
    update([*run])
    batches_s = []
    for _ in range(20):
        start_s = time.perf_counter()
        for _ in range(50):
            update([*run])
        batches_s.append((time.perf_counter() - start_s) / 50)
    assert min(batches_s) < 60e-6


@pytest.mark.parametrize(
    "wrong",
    [{"step": 0}, {"beta1": 1.0}, {"beta2": -0.1}, {"lr": -1.0}, {"lr": float("nan")}, {"eps": -1.0}],
    ids=str,
)
def test_hyper_parameters_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AdamHyper(**{"lr": 1e-3, **wrong})
