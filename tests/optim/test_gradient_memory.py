"""Gradients and parameters that are no plain memory: made so, or refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import chunkc
from chunkc.session.session import managing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Wrapped(torch.Tensor):
    """Has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(cls, lambda value: value.inner, (args, kwargs or {}))
        result = function(*plain[0], **plain[1])
        return cls(result) if function is torch.ops.aten.detach.default else result


class Named(torch.Tensor):
    """A subclass in ordinary memory."""


def values() -> torch.Tensor:
    return torch.arange(25.0).view(5, 5) / 25 - 0.3


def freed() -> torch.Tensor:
    gradient = values()
    gradient.untyped_storage().resize_(0)
    return gradient


MADE_PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch._efficientzerotensor((5, 5)),
    "negative": lambda: torch.complex(torch.zeros(5, 5), values()).conj().imag,
    "negative_dense": lambda: torch._neg_view(values()),
    "subclass": lambda: values().as_subclass(Named),
}
REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: values().to_sparse(),
    "wrapped": lambda: Wrapped(values()),
    "freed": freed,
}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape).copy_(tensor.as_subclass(torch.Tensor))


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(-1, 1, 4)), nn.Parameter(values() * 3)]


@pytest.mark.parametrize("kind", MADE_PLAIN)
def test_a_gradient_that_is_no_plain_memory_is_what_pytorch_reads_there(kind: str) -> None:
    mine, shadow_copies = parameters(), parameters()
    for of, module in ((mine, chunkc.optim), (shadow_copies, torch.optim)):
        optimizer = module.AdamW(of, lr=0.1)
        for _ in range(2):
            of[0].grad, of[1].grad = torch.ones(4), MADE_PLAIN[kind]()
            gradient = of[1].grad
            optimizer.step()
            assert of[1].grad is gradient
    for parameter, shadow in zip(mine, shadow_copies):
        torch.testing.assert_close(parameter, shadow)


@pytest.mark.parametrize("kind", MADE_PLAIN)
def test_it_is_clipped(kind: str) -> None:
    of = parameters()
    optimizer = chunkc.optim.SGD(of, lr=1.0)
    before = [parameter.detach().clone() for parameter in of]
    of[0].grad, of[1].grad = torch.ones(4), MADE_PLAIN[kind]()
    gradients = [torch.ones(4), plain(MADE_PLAIN[kind]())]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    torch.testing.assert_close(optimizer.clip_grad_norm_(0.5), norm)
    optimizer.step()
    for parameter, former, gradient in zip(of, before, gradients):
        torch.testing.assert_close(parameter, former - gradient * 0.5 / norm)


def test_pytorch_makes_one_of_sgn() -> None:
    parameter = parameters()[1]
    optimizer = chunkc.optim.SGD([parameter], lr=1.0)
    torch.sgn(parameter).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad._is_zerotensor()
    optimizer.step()
    assert torch.equal(parameter, parameters()[1])
    assert not parameter.grad._is_zerotensor()  # the next backward may add to it


@pytest.mark.parametrize("kind", REFUSED)
def test_a_gradient_without_memory_is_refused_before_anything_changes(kind: str) -> None:
    of = parameters()
    optimizer = chunkc.optim.AdamW(of)
    of[0].grad, of[1].grad = torch.ones(4), REFUSED[kind]()
    for call in (optimizer.step, optimizer.grad_norm):
        with pytest.raises(chunkc.UnsupportedError, match="parameter 1 of parameter group 0"):
            call()
    assert torch.equal(of[0], parameters()[0])
    assert not optimizer.state


@pytest.mark.parametrize("kind", ["meta", "wrapped", "zeros"])
def test_a_parameter_without_memory_is_refused_before_anything_changes(kind: str) -> None:
    odd = {"meta": torch.empty(5, 5, device="meta"), "wrapped": Wrapped(values()), "zeros": MADE_PLAIN["zeros"]()}
    data = odd[kind]
    of = [parameters()[0], nn.Parameter(data)]
    optimizer = chunkc.optim.AdamW(of)
    of[0].grad, of[1].grad = torch.ones(4), torch.ones(5, 5, device=data.device)
    with pytest.raises(chunkc.UnsupportedError, match="parameter 1 of parameter group 0"):
        optimizer.step()
    assert torch.equal(of[0], parameters()[0])


def compiled() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    call = torch.compile(model, backend="chunkc", options={"memory_budget": "80KiB", "codegen": "eager"})
    return model, call


@pytest.mark.parametrize("kind", MADE_PLAIN)
def test_at_home_it_is_copied_there(kind: str) -> None:
    model, call = compiled()
    optimizer = chunkc.optim.SGD(model.parameters(), lr=1.0)
    call(torch.ones(2, 64)).sum().backward()
    weight = model[0].weight
    assert managing(weight) is not None
    expected = weight.detach().clone()
    gradient = torch.zeros(64, 64)
    gradient[:5, :5] = plain(MADE_PLAIN[kind]())
    weight.grad = _like(kind, gradient)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), expected - gradient)
    call(torch.ones(2, 64)).sum().backward()


def _like(kind: str, gradient: torch.Tensor) -> torch.Tensor:
    if kind == "zeros":
        return torch._efficientzerotensor((64, 64))
    if kind == "subclass":
        return gradient.as_subclass(Named)
    return torch._neg_view(-gradient)


@pytest.mark.parametrize("kind", ["sparse", "wrapped"])
def test_at_home_what_cannot_be_copied_is_refused_by_name(kind: str) -> None:
    model, call = compiled()
    optimizer = chunkc.optim.SGD(model.parameters(), lr=1.0)
    call(torch.ones(2, 64)).sum().backward()
    gradient = torch.ones(64, 64)
    model[0].weight.grad = gradient.to_sparse() if kind == "sparse" else Wrapped(gradient)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(chunkc.UnsupportedError, match=r"0\.weight"):
        optimizer.step()
    with pytest.raises(chunkc.UnsupportedError, match=r"0\.weight"):
        call(torch.ones(2, 64)).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.zero_grad()
    call(torch.ones(2, 64)).sum().backward()
    optimizer.step()
