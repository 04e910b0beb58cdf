"""What autograd keeps, a hook makes or the user gives is counted: retained graphs, gradients that a hook returned, and
the user's own ones. Of gradients that start a backward, autograd lets go of its
own; a caller of `out.backward(g)` keeps `g`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import pytest
import torch
from plain_modules import Residual
from torch import Tensor, nn

import chunkc
from chunkc.runtime.device import cpu_allocator
from chunkc.torch_private.engine import KEEPS_TANGENTS

SCALARS_NBYTES = 4096
"""More than the losses and tangents of a second backward, which no plan counts."""


def backward_twice(model: Residual, call: Callable[[Tensor], Tensor], x: Tensor, step: int) -> None:
    loss = call(x)
    loss.backward(retain_graph=True)
    loss.backward()


def backward_with_a_hook(model: Residual, call: Callable[[Tensor], Tensor], x: Tensor, step: int) -> None:
    handle = model.blocks[1][1].weight.register_hook(lambda grad: grad * 2) if step > 1 else None
    call(x).backward()
    if handle is not None:
        handle.remove()


def give_gradients(model: Residual) -> list[Tensor]:
    """Own tensors, as large as all else in the budget; whoever has the list holds them."""
    weights = [block[index].weight for block in model.blocks for index in (1, 3)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.01)
    return [weight.grad for weight in weights]


def backward_onto_own_gradients(model: Residual, call: Callable[[Tensor], Tensor], x: Tensor, step: int) -> None:
    held = give_gradients(model)
    call(x).backward()
    assert all(p.grad is None or p.dim() == 1 or any(p.grad is g for g in held) for p in model.parameters())


def backward_onto_later_gradients(model: Residual, call: Callable[[Tensor], Tensor], x: Tensor, step: int) -> None:
    loss = call(x)
    held = give_gradients(model)
    loss.backward()
    assert all(p.grad is None or p.dim() == 1 or any(p.grad is g for g in held) for p in model.parameters())


def backward_onto_gradients_let_go_of(model: Residual, call: Callable[[Tensor], Tensor], x: Tensor, step: int) -> None:
    give_gradients(model)
    call(x).backward()


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("backward", "budget_nbytes"),
    [
        (backward_twice, 650_000),
        (backward_with_a_hook, 700_000),
        (backward_onto_own_gradients, 1_200_000),
        (backward_onto_later_gradients, 1_200_000),
        (backward_onto_gradients_let_go_of, 700_000),
    ],
)
def test_no_more_is_taken_than_predicted(backward: Callable[..., None], budget_nbytes: int) -> None:
    def train(memory_budget: int) -> tuple[list[Tensor], int, int]:
        torch._dynamo.reset()
        gc.collect()
        before = cpu_allocator.current_nbytes()
        torch.manual_seed(1)
        model = Residual(4)
        options = {"memory_budget": memory_budget, "codegen": "eager", "whole_graph": "never", "chunk_size": 70_000}
        compiled = torch.compile(model, backend="chunkc", options=options)
        optimizer = chunkc.optim.AdamW(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(3)
        for step in range(4):
            backward(model, compiled, torch.randn(8, 64, generator=generator), step)
            optimizer.step()
            optimizer.zero_grad()
        report = chunkc.report(model)
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        return weights, report.predicted_peak_nbytes, report.measured_peak_nbytes - before

    cpu_allocator.install()
    expected, *_ = train(10_000_000)
    weights, predicted, measured = train(budget_nbytes)
    assert all(torch.equal(left, right) for left, right in zip(weights, expected, strict=True))
    assert measured <= predicted + SCALARS_NBYTES
    assert predicted <= budget_nbytes


# ---------------------------------------------------------------- the gradients that start a backward

# AOTAutograd copies a gradient whose strides are not its output's; a plan counts both, where the original is kept.

BATCH, WIDTH = 64, 1024
OUTPUT_NBYTES = 4 * BATCH * WIDTH
LOSS_NBYTES = 2 * 4
"""A loss computed outside the graph, and its gradient: the caller's own, not the plan's."""


Outputs = Tensor | tuple[Tensor, ...]
Last = Callable[[Tensor], Outputs]


def _nothing(out: Tensor) -> Tensor:
    return out


class Widening(nn.Module):
    """Its backward is fullest at the first activation, when the output's gradient has been read for the last time."""

    def __init__(self, last: Last = _nothing) -> None:
        super().__init__()
        self.last = last
        self.first = nn.Linear(8, WIDTH)
        self.second = nn.Linear(WIDTH, 8)
        self.third = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Outputs:
        hidden = nn.functional.silu(nn.functional.silu(self.first(x)) ** 2)
        return self.last(self.third(self.second(hidden)))


def _peaks(start: Callable[..., None], last: Last = _nothing) -> tuple[int, int]:
    """Predicted and measured bytes of a run whose backwards are begun by `start`, of a model that ends with `last`."""
    cpu_allocator.install()
    torch._dynamo.reset()
    gc.collect()
    foreign_nbytes = cpu_allocator.current_nbytes()
    torch.manual_seed(0)
    model = Widening(last)
    options = {"memory_budget": "8MiB", "codegen": "eager", "whole_graph": "never"}
    compiled = torch.compile(model, backend="chunkc", options=options)
    optimizer = chunkc.optim.AdamW(model.parameters())
    for _ in range(2):  # the first makes the optimizer's states, which are predicted from the start
        start(compiled(torch.randn(BATCH, 8)))
        optimizer.step()
        optimizer.zero_grad()
    report = chunkc.report(compiled)
    return report.predicted_peak_nbytes, report.measured_peak_nbytes - foreign_nbytes


def _backward_of_sum(out: Tensor) -> None:
    (-out).sum().backward()


def _backward_with_gradient(out: Tensor) -> None:
    out.backward(torch.ones(BATCH, WIDTH))


@pytest.mark.parametrize(("start", "own_nbytes"), [(_backward_with_gradient, 0), (_backward_of_sum, LOSS_NBYTES)])
def test_a_given_gradient_counts_and_autograds_own_is_let_go(start: Callable[[Tensor], None], own_nbytes: int) -> None:
    predicted, measured = _peaks(start)
    assert measured - predicted == own_nbytes


@pytest.mark.skipif(KEEPS_TANGENTS, reason="up to PyTorch 2.12, AOTAutograd holds every gradient that it gives")
def test_a_given_gradient_is_held_throughout() -> None:
    assert _peaks(_backward_with_gradient)[0] - _peaks(_backward_of_sum)[0] == OUTPUT_NBYTES


# --- gradients that are laid out otherwise than their outputs ---


def _contiguous(out: Tensor) -> Tensor:
    return torch.ones(out.shape, dtype=out.dtype)


def _transposed(out: Tensor) -> Tensor:
    return torch.ones(out.mT.shape, dtype=out.dtype).mT


def _of_a_larger_tensor(out: Tensor) -> Tensor:
    return torch.ones(2, *out.shape, dtype=out.dtype)[1]


def _with_kept(make: Callable[[Tensor], Tensor]) -> Callable[[Outputs], None]:
    def start(outputs: Outputs) -> None:
        of_all = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        gradients = [make(out) for out in of_all]
        torch.autograd.backward(of_all, gradients)
        assert all(gradient.real.sum() == gradient.numel() for gradient in gradients)

    return start


ENDS: dict[str, Last] = {
    "as it is": _nothing,
    "transpose": lambda out: out.unflatten(0, (8, 8)).transpose(1, 2),
    "fft": lambda out: torch.fft.fft(out.mT).mT,
    "conjugated": lambda out: torch.fft.ifft(out.mT).mT,
    "a chunk": lambda out: out.chunk(2, -1)[0],
    "chunk": lambda out: out.chunk(2, -1),
    "unbind": lambda out: out.unflatten(-1, (-1, 2)).unbind(-1),
    "memory_format": lambda out: out.view(1, 4, BATCH // 4, WIDTH).to(memory_format=torch.channels_last),
}


@pytest.mark.quick(8)
@pytest.mark.parametrize("last", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize(
    "make", [_contiguous, _transposed, torch.ones_like, _of_a_larger_tensor], ids=lambda make: make.__name__.strip("_")
)
def test_a_kept_gradient_and_its_copy_count(make: Callable[[Tensor], Tensor], last: Last) -> None:
    predicted, measured = _peaks(_with_kept(make), last)
    assert measured <= predicted if KEEPS_TANGENTS else measured == predicted


def _of_a_stack(outputs: Sequence[Tensor]) -> None:
    """Gradients of both are views of one tensor."""
    torch.cat(list(outputs)).exp().sum().backward()


def _beside_more(out: Tensor) -> None:
    """The gradient is a view of a tensor of eight times its size."""
    torch.cat([out, torch.zeros_like(out).repeat(7, 1)]).exp().sum().backward()


OF_AUTOGRAD = [(_of_a_stack, lambda out: (out * 2, out * 3)), (_beside_more, _nothing)]


@pytest.mark.parametrize(("start", "last"), OF_AUTOGRAD, ids=["of a stack", "beside more"])
def test_views_of_a_larger_gradient_count_it_whole(start: Callable[..., None], last: Last) -> None:
    predicted, measured = _peaks(start, last)
    assert measured - LOSS_NBYTES <= predicted
