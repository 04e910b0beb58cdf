"""The updates that the suite `adam` times: chunkc's, its peers', and loops that do nothing but move the same bytes.

Each maker allocates one working set of flat tensors and returns an `Update`. All optimizers start from the same
parameters and see the same gradient at every step, so that what they computed can be compared.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from measuring.subject_process import Unavailable
from torch import Tensor

from suites import adam_spec as names
from suites.adam_spec import BF16, FP32, AdamSpec

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.1
_ADAM: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
_BLOCK_LENGTH = 65_521  # a prime; values repeat after so many elements


@dataclass(frozen=True)
class Update:
    """Run one pass over the working set.

    Attributes:
        run: the pass.
        nbytes: what an ideal pass reads and writes.
        result: the fp32 parameters so far, to be compared; None of a loop that only moves bytes.
    """

    run: Callable[[], object]
    nbytes: int
    result: Callable[[], Tensor] | None = None


def make(spec: AdamSpec) -> Update:
    """The candidate with its working set.

    Raises:
        Unavailable: it is not installed, or does not work on this device.
    """
    return _MAKERS[spec.candidate](spec)


def reference(num_elements: int, num_steps: int) -> Tensor:
    """fp32 parameters after `num_steps` updates, by `torch.optim.AdamW` one tensor at a time."""
    return _reference(num_elements, num_steps, torch.float32)


def reference_bf16(num_elements: int, num_steps: int) -> Tensor:
    """Masters after reference updates with gradients rounded to bf16."""
    return _reference(num_elements, num_steps, torch.bfloat16)


def _reference(num_elements: int, num_steps: int, grad_dtype: torch.dtype) -> Tensor:
    param = torch.nn.Parameter(_values(num_elements, "cpu", 0, torch.float32))
    param.grad = _values(num_elements, "cpu", 1, grad_dtype).float()
    optimizer = torch.optim.AdamW([param], foreach=False, **_ADAM)
    for _ in range(num_steps):
        optimizer.step()
    return param.detach()


def _chunkc(spec: AdamSpec) -> Update:
    return _chunkc_triton(spec) if spec.device == "cuda" else _chunkc_cpu(spec)


def _chunkc_cpu(spec: AdamSpec) -> Update:
    """`chunkc.kernels.elementwise_cpu`, one run over all."""
    from chunkc.kernels.elementwise_cpu import prepare
    from chunkc.kernels.formats import AdamFormat

    is_bf16 = spec.precision == BF16
    target, grad, exp_avg, exp_avg_sq = _working_set(spec)
    param = target.bfloat16() if is_bf16 else target
    fmt = AdamFormat(param.dtype, grad.dtype, master=is_bf16)
    masters = [target] if is_bf16 else []
    steps = itertools.count(1)

    def run() -> None:
        prepare(fmt, _hyper(next(steps)))([param, grad, exp_avg, exp_avg_sq, *masters])

    return Update(run, _nbytes(spec), lambda: target)


def _chunkc_triton(spec: AdamSpec) -> Update:
    """`chunkc.kernels.elementwise_triton`, one launch over all."""
    if importlib.util.find_spec("chunkc.kernels.elementwise_triton") is None:
        raise Unavailable("chunkc has no Triton update")
    from chunkc.kernels import elementwise_triton
    from chunkc.kernels.formats import AdamFormat, AdamSlots, Span
    from chunkc.kernels.hyperparameters import scalar_table

    is_bf16 = spec.precision == BF16
    target, grad, exp_avg, exp_avg_sq = _working_set(spec)
    param = target.bfloat16() if is_bf16 else target
    fmt = AdamFormat(param.dtype, grad.dtype, master=is_bf16)
    slots = AdamSlots(param, grad, exp_avg, exp_avg_sq, target if is_bf16 else None)
    work = elementwise_triton.work_table([Span(0, spec.num_elements, 0)], fmt).to(spec.device)
    steps = itertools.count(1)

    def run() -> None:
        scalars = scalar_table([_hyper(next(steps))]).to(spec.device, non_blocking=True)
        elementwise_triton.update(fmt, slots, work, scalars)

    return Update(run, _nbytes(spec), lambda: target)


def _chunkc_split(spec: AdamSpec) -> Update:
    """chunkc's kernels, with a master in two halves: the parameter and its lower 16 bits."""
    from chunkc.kernels import elementwise_cpu
    from chunkc.kernels.formats import AdamFormat, AdamSlots, Span
    from chunkc.kernels.hyperparameters import scalar_table
    from chunkc.kernels.split import join_master, split_master

    target, grad, exp_avg, exp_avg_sq = _working_set(spec)
    param, lower = split_master(target)
    fmt = AdamFormat(param.dtype, grad.dtype, master=True, split=True)
    slots = AdamSlots(param, grad, exp_avg, exp_avg_sq, lower)
    spans = [Span(0, spec.num_elements, 0)]
    steps = itertools.count(1)
    if spec.device == "cuda":
        from chunkc.kernels import elementwise_triton

        work = elementwise_triton.work_table(spans, fmt).to(spec.device)

    def run() -> None:
        scalars = scalar_table([_hyper(next(steps))])
        if spec.device == "cuda":
            elementwise_triton.update(fmt, slots, work, scalars.to(spec.device, non_blocking=True))
        else:
            elementwise_cpu.chunk_update(fmt, slots, spans, scalars)

    return Update(run, names.SPLIT_NBYTES_PER_ELEMENT * spec.num_elements, lambda: join_master(param, lower))


def _torch_adamw(spec: AdamSpec, *, has_casts: bool = False, **kind: Any) -> Update:
    return _optimizer(spec, lambda parameters: torch.optim.AdamW(parameters, **_ADAM, **kind), has_casts=has_casts)


def _deepspeed(spec: AdamSpec, *, has_casts: bool = False) -> Update:
    """DeepSpeed's CPU Adam as its offloading uses it; it compiles at the first use."""
    if spec.device != "cpu":
        raise Unavailable("it updates on the CPU")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return _optimizer(
        spec, lambda parameters: DeepSpeedCPUAdam(parameters, adamw_mode=True, **_ADAM), has_casts=has_casts
    )


def _torchao_8bit(spec: AdamSpec) -> Update:
    from torchao.optim import AdamW8bit

    return _low_bit(spec, lambda parameters: AdamW8bit(parameters, **_ADAM))


def _bitsandbytes(spec: AdamSpec, *, bits: int) -> Update:
    import bitsandbytes

    kind = bitsandbytes.optim.AdamW8bit if bits == 8 else bitsandbytes.optim.AdamW32bit
    return _low_bit(spec, lambda parameters: kind(parameters, **_ADAM))


def _optimizer(
    spec: AdamSpec, make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], *, has_casts: bool
) -> Update:
    """An optimizer of one fp32 tensor, with or without the copies from and to bf16 that go with it."""
    target, grad, _, _ = _working_set(spec, has_moments=False)
    parameter = torch.nn.Parameter(target)
    parameter.grad = grad.float() if grad.dtype != torch.float32 else grad
    optimizer = make_optimizer([parameter])
    narrow = target.bfloat16() if has_casts else None

    def run() -> None:
        if narrow is None:
            optimizer.step()
            return
        assert parameter.grad is not None
        parameter.grad.copy_(grad)
        optimizer.step()
        narrow.copy_(parameter.detach())

    return Update(run, _nbytes(spec), parameter.detach)


def _low_bit(spec: AdamSpec, make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Update:
    """An optimizer that takes the parameter in its own dtype: bf16 without a master, or fp32."""
    target, grad, _, _ = _working_set(spec, has_moments=False)
    # These choose a tensor's format by its shape: a vector would be taken for a bias.
    parameter = torch.nn.Parameter(target.to(grad.dtype).view(-1, 256))
    parameter.grad = grad.view(-1, 256)
    optimizer = make_optimizer([parameter])
    return Update(optimizer.step, _nbytes(spec), lambda: parameter.detach().view(-1))


def _copy(spec: AdamSpec) -> Update:
    """Copy: one read and one write."""
    num_elements = spec.num_elements * 2
    a = _values(num_elements, spec.device, 0, torch.float32)
    b = torch.zeros_like(a)
    return Update(lambda: b.copy_(a), 8 * num_elements)


def _add(spec: AdamSpec) -> Update:
    """Two reads and one write."""
    num_elements = spec.num_elements * 2
    a, b = (_values(num_elements, spec.device, seed, torch.float32) for seed in (0, 1))
    return Update(lambda: a.add_(b), 12 * num_elements)


def _loop(spec: AdamSpec) -> Update:
    """The update's reads and writes in its order, with one addition each: what STREAM's triad is to a vector."""
    a, grad, b, c = _working_set(spec)
    if spec.precision == FP32:

        def sweep(a: Tensor, b: Tensor, c: Tensor, grad: Tensor) -> None:
            a.add_(grad)
            b.add_(grad)
            c.add_(grad)

        tensors = [a, b, c, grad]
    else:
        narrow = a.bfloat16()

        def sweep(a: Tensor, b: Tensor, c: Tensor, grad: Tensor, narrow: Tensor | None = None) -> None:
            wide = grad.float()
            a.add_(wide)
            b.add_(wide)
            c.add_(wide)
            assert narrow is not None
            narrow.copy_(a)

        tensors = [a, b, c, grad, narrow]
    compiled = torch.compile(sweep, fullgraph=True, dynamic=False)
    return Update(lambda: compiled(*tensors), _nbytes(spec))


_MAKERS: Mapping[str, Callable[[AdamSpec], Update]] = {
    names.CHUNKC: _chunkc,
    names.CHUNKC_SPLIT: _chunkc_split,
    names.COPY: _copy,
    names.ADD: _add,
    names.LOOP: _loop,
    names.FUSED: lambda spec: _torch_adamw(spec, fused=True),
    names.FUSED_CASTS: lambda spec: _torch_adamw(spec, has_casts=True, fused=True),
    names.FOREACH: lambda spec: _torch_adamw(spec, foreach=True),
    names.DEEPSPEED: _deepspeed,
    names.DEEPSPEED_CASTS: lambda spec: _deepspeed(spec, has_casts=True),
    names.TORCHAO_8BIT: _torchao_8bit,
    names.BNB_8BIT: lambda spec: _bitsandbytes(spec, bits=8),
    names.BNB_32BIT: lambda spec: _bitsandbytes(spec, bits=32),
}


def _hyper(step: int) -> Any:
    from chunkc.kernels.hyperparameters import AdamHyper

    return AdamHyper(LR, *BETAS, EPS, WEIGHT_DECAY, step)


def _nbytes(spec: AdamSpec) -> int:
    return names.NBYTES_PER_ELEMENT * spec.num_elements


def _working_set(spec: AdamSpec, *, has_moments: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """fp32 parameter or master, gradient in the precision's dtype, two moments (empty if not wanted)."""
    grad_dtype = torch.bfloat16 if spec.precision == BF16 else torch.float32
    length = spec.num_elements if has_moments else 0
    target = _values(spec.num_elements, spec.device, 0, torch.float32)
    grad = _values(spec.num_elements, spec.device, 1, grad_dtype)
    exp_avg, exp_avg_sq = (torch.zeros(length, device=spec.device) for _ in range(2))
    return target, grad, exp_avg, exp_avg_sq


def _values(num_elements: int, device: str, seed: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers, a block of them again and again: random ones for all would take longer than the measurement."""
    block = torch.randn(_BLOCK_LENGTH, generator=torch.Generator().manual_seed(seed))
    values = torch.empty(num_elements, dtype=dtype, device=device)
    whole = num_elements // _BLOCK_LENGTH * _BLOCK_LENGTH
    values[:whole].view(-1, _BLOCK_LENGTH).copy_(block.to(device, dtype).expand(whole // _BLOCK_LENGTH, -1))
    values[whole:].copy_(block[: num_elements - whole])
    return values
