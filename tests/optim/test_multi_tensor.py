"""Parameters that stay on a GPU are updated in few launches, with the bits that each would have alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from interpreting import interpret, needs_triton
from torch import Tensor, nn

import chunkc
from chunkc.kernels import elementwise_triton
from chunkc.kernels.formats import AdamFormat, UpdateFormat
from chunkc.kernels.hyperparameters import AdamHyper
from chunkc.kernels.pointer_offsets import alignment_of, kinds_of, pointer_offsets_of
from chunkc.kernels.sgd import SgdFormat
from chunkc.optim import on_device, rule
from chunkc.optim import on_device as together
from chunkc.optim.rule import ResidentTensor

FORMATS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fp32": lambda p: chunkc.optim.AdamW(p, lr=0.1),
    "bf16 split": lambda p: chunkc.optim.AdamW(p, lr=0.1),
    "bf16 moments": lambda p: chunkc.optim.Adam(p, lr=0.1, moments_dtype=torch.bfloat16, stochastic_rounding=False),
    "int8": lambda p: chunkc.optim.AdamW(p, lr=0.1, moments_dtype="int8"),
    "sgd": lambda p: chunkc.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd plain": lambda p: chunkc.optim.SGD(p, lr=0.1),
    "bf16 stochastic": lambda p: chunkc.optim.AdamW(p, lr=0.1, stochastic_rounding=True),
    "bf16 moments stochastic": lambda p: chunkc.optim.Adam(
        p, lr=0.1, moments_dtype=torch.bfloat16, stochastic_rounding=True
    ),
    "sgd bf16 stochastic": lambda p: chunkc.optim.SGD(p, lr=0.1, momentum=0.9, stochastic_rounding=True),
}
LAMB: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lamb fp32": lambda p: chunkc.optim.LAMB(p, lr=0.1, weight_decay=0.1),
    "lamb bf16": lambda p: chunkc.optim.LAMB(p, lr=0.1, always_adapt=True, max_coeff=0.7),
}
"""Norms are added up in another order on the CPU: these are compared with launches of their own."""
SHAPES = [(), (1,), (16,), (300,), (5, 7), (2, 3, 5), (1025,)]


NUM_STEPS = 2


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Small ones, some transposed, at an odd address, with gaps, or over the limit of a launch."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    odd = [values(16, 25).t(), values(101)[1:], values(8, 9)[:, :3], values(2100), values(8, 6).t()[1:]]
    return [nn.Parameter(value) for value in (*(values(*shape) for shape in SHAPES), *odd)]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if (number + step) % 5 == 0 else torch.empty_like(p).copy_(grad) if number % 3 else grad


def some_place(parameter: Tensor) -> tuple[int, int] | None:
    """Matrices are in chunk groups."""
    return (3, 10_007 * parameter.shape[0]) if parameter.dim() == 2 else None


def trained(name: str, *, by_triton: bool, limit: int = 2000) -> tuple[list[Tensor], int]:
    """Parameters after two steps, and the number of launches; `limit`: elements of a launch."""
    params = parameters(torch.bfloat16 if "bf16" in name and "moments" not in name else torch.float32)
    count = [0]

    def counted(launch: Callable[..., None]) -> Callable[..., None]:
        def counting(*args: Any, **kwargs: Any) -> None:
            count[0] += 1
            launch(*args, **kwargs)

        return counting

    groups = [{"params": params[::2], "lr": 0.05}, {"params": params[1::2]}]
    with (
        mock.patch.object(on_device, "computes_by_triton", return_value=by_triton),
        mock.patch.object(elementwise_triton, "update", counted(elementwise_triton.update)),
        mock.patch.object(together, "MAX_NUM_ELEMENTS", limit),
        mock.patch.object(rule, "place_in_group", some_place),
    ):
        optimizer = (FORMATS | LAMB)[name](groups)
        for step in range(NUM_STEPS):
            give_gradients(params, step)
            optimizer.step()
    states = [state for p in params for kind, state in sorted(optimizer.state[p].items()) if kind != "step"]
    return [value.detach() for value in (*params, *states)], count[0]


def interpreted(name: str) -> str:
    wanted, num_alone = trained(name, by_triton=name in LAMB, limit=0)
    found, num_launches = trained(name, by_triton=True)
    num_stages = 2 if name in LAMB else 1
    if not NUM_STEPS * 3 <= num_launches / num_stages <= NUM_STEPS * 9 or 0 < num_alone <= num_launches:
        return f"{num_alone} and {num_launches} launches"
    wrong = [i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if not torch.equal(a, b)]
    return f"of {len(wanted)} tensors {wrong} differ" if wrong else ""


@pytest.mark.quick(0, second=6)
@needs_triton
@pytest.mark.parametrize("name", [*FORMATS, *LAMB])
def test_bits_are_those_of_the_cpu_or_of_launches_for_each(name: str) -> None:
    assert not interpret(__file__, name)


# ---------------------------------------------------------------- what goes together

FP32 = AdamFormat(torch.float32, torch.float32)
HYPER = AdamHyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3, decoupled=True)


def staying(parameter: Tensor, gradient: Tensor | None = None) -> ResidentTensor:
    parameter = nn.Parameter(parameter)
    parameter.grad = torch.empty_like(parameter) if gradient is None else gradient
    return ResidentTensor(parameter, HYPER, {kind: torch.empty_like(parameter) for kind in FP32.kinds}, 0)


def aligned(numel: int, offset: int = 0) -> Tensor:
    """fp32, at an address that is a multiple of 64 bytes and `offset` elements more."""
    room = torch.empty(numel + 64)
    first = -room.data_ptr() % 64 // 4 + offset
    return room[first : first + numel]


def sizes(tensors: list[ResidentTensor]) -> list[list[int]]:
    along = [(tensor, FP32) for tensor in tensors if together.can_be_batched(tensor)]
    return [[of.parameter.numel() for of in batch.tensors] for batch in together.batches(along)]


def on_units(numel: int, offset: int = 0) -> ResidentTensor:
    found = staying(aligned(numel, offset), aligned(numel))
    return ResidentTensor(found.parameter, HYPER, {kind: aligned(numel) for kind in FP32.kinds}, 0)


def test_what_is_aligned_alike_is_one_launch() -> None:
    assert sizes([on_units(3), on_units(5, offset=1), on_units(7), on_units(9, offset=17)]) == [[3, 7], [5, 9]]


def test_a_launch_has_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "MAX_NUM_ELEMENTS", 10)
    monkeypatch.setattr(together, "MAX_NUM_TENSORS", 2)
    assert sizes([on_units(n) for n in (4, 6, 1, 1, 1, 10, 11, 3)]) == [[4, 6], [1, 1], [1], [10], [3]]


def test_what_shares_memory_is_updated_in_turn() -> None:
    one = on_units(64)
    other = ResidentTensor(nn.Parameter(one.parameter.detach()[48:]), HYPER, {k: aligned(16) for k in FP32.kinds}, 1)
    other.parameter.grad = aligned(16)
    assert sizes([one, on_units(5), other]) == [[64], [5], [16]]


def test_gaps_and_other_orders_stay_alone() -> None:
    assert not together.can_be_batched(staying(torch.empty(4, 8)[:, :3]))
    assert not together.can_be_batched(staying(torch.empty(4, 8), torch.empty(8, 4).t()))
    assert together.can_be_batched(staying(torch.empty(4, 8).t(), torch.empty(4, 8).t()))


def test_tables_of_a_launch_are_small() -> None:
    tensors = [(together.MAX_NUM_ELEMENTS // together.MAX_NUM_TENSORS + 17, 0)] * together.MAX_NUM_TENSORS
    work = elementwise_triton.work_of_tensors(tensors, FP32)
    assert work.rows.nbytes <= on_device.TABLE_NBYTES // 4
    assert len(kinds_of(FP32)) * 8 * len(tensors) <= on_device.POINTER_OFFSETS_NBYTES // 4


def test_what_is_sent_again_takes_the_same_place() -> None:
    first, second = torch.arange(4), torch.arange(4) + 1
    sent = on_device.Sent(first, first.clone())
    place = sent.on_device.data_ptr()
    for now in (first, second, second, first):
        sent.follow(now)
        assert torch.equal(sent.on_device, now)
    assert sent.on_device.data_ptr() == place


@pytest.mark.parametrize("fmt", [FP32, AdamFormat(torch.bfloat16, torch.bfloat16, "int8", master=True), SgdFormat(
    torch.float32, torch.float32)], ids=["fp32", "int8", "sgd"])  # fmt: skip
def test_distances_lead_from_the_first_tensor_to_each(fmt: UpdateFormat) -> None:
    units = alignment_of(fmt)
    steps = np.arange(3 * len(units)).reshape(3, -1) - 4
    addresses = 1 << 40 | np.arange(len(units)) * 8 + 0 * steps
    found = pointer_offsets_of(addresses + steps * units, fmt)
    assert torch.equal(found, torch.from_numpy(steps - steps[0]))
