"""Parameters and gradients with gaps between their elements, in other orders, in one memory: as in `torch.optim`.

Those that are no plain memory are made so, or refused before anything changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import chunkc
from chunkc.ir.states import MASTER_LOW
from chunkc.ir.strides import is_dense
from chunkc.optim.memory_checks import _overlap
from chunkc.session.session import managing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

AdamW, Adam, LAMB = chunkc.optim.AdamW, chunkc.optim.Adam, chunkc.optim.LAMB

PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda base: base.view(24, 25)[:, :3],
    "every second": lambda base: base[1::2],
    "transposed, with gaps": lambda base: base.view(24, 25)[:, :10].t(),
    "channels last, with gaps": lambda base: base.view(4, 5, 5, 6).permute(0, 3, 1, 2)[:, :5],
    "interleaving": lambda base: base.as_strided((3, 2), (2, 3), 7),
    "inside": lambda base: base[3:100].view(1, 97),
    "transposed": lambda base: base.view(24, 25).t(),
    "a number": lambda base: base[7],
    "nothing": lambda base: base.view(24, 25)[:, 3:3],
    "all": lambda base: base,
}
"""Parts of 600 elements."""

GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda g: g,
    "transposed": lambda g: g.t().clone(memory_format=torch.contiguous_format).t() if g.dim() == 2 else g,
    "with gaps": lambda g: torch.stack([g, g], -1)[..., 0],
    "negated": lambda g: torch._neg_view(-g),
    "expanded": lambda g: g.reshape(-1)[:1].expand(g.shape) if g.dim() else g,
}

FORMATS: dict[str, tuple[torch.dtype, Callable[..., Any]]] = {
    "AdamW": (torch.float32, AdamW),
    "Adam": (torch.float32, Adam),
    "LAMB": (torch.float32, LAMB),
    "split": (torch.bfloat16, AdamW),
    "master": (torch.bfloat16, partial(AdamW, master_weights="float32")),
    "LAMB, master": (torch.bfloat16, LAMB),
    "8-bit": (torch.float32, partial(AdamW, moments_dtype="int8")),
    "stochastic": (torch.bfloat16, partial(AdamW, moments_dtype="bfloat16", stochastic_rounding=True)),
}

SETTINGS = {"lr": 1e-1, "weight_decay": 0.1}


def base_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(600, generator=torch.Generator().manual_seed(0)).to(dtype)


def gradient_of(parameter: Tensor, step: int) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)).to(parameter.dtype)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("make", FORMATS)
def test_a_part_is_updated_as_its_clone_is_and_nothing_else(make: str, part: str) -> None:
    dtype, optimizer_of = FORMATS[make]
    base = base_of(dtype)
    before = base.clone()
    parameter = nn.Parameter(PARTS[part](base))
    shadow = nn.Parameter(parameter.detach().clone())
    assert is_dense(shadow)
    optimizer, twin_optimizer = optimizer_of([parameter], **SETTINGS), optimizer_of([shadow], **SETTINGS)
    for step in range(2):
        parameter.grad, shadow.grad = gradient_of(parameter, step), gradient_of(parameter, step)
        optimizer.step()
        twin_optimizer.step()
    assert torch.equal(parameter, shadow)
    assert parameter.numel() == 0 or not torch.equal(parameter, PARTS[part](before))
    for kind, state in optimizer.state[parameter].items():
        assert torch.equal(state, twin_optimizer.state[shadow][kind])
        assert is_dense(state)
    # Saved, loaded, copied: the same, also where a master makes the parameter anew.
    for saved in (optimizer.state_dict(), copy.deepcopy(optimizer.state_dict())):
        for kind, state in saved["state"][0].items():
            assert torch.equal(state, twin_optimizer.state_dict()["state"][0][kind])
        if MASTER_LOW in optimizer.state[parameter]:
            with torch.no_grad():
                parameter.zero_()
        optimizer.load_state_dict(saved)
        assert torch.equal(parameter, shadow)
        twin_optimizer.load_state_dict(twin_optimizer.state_dict())
    parameter.grad, shadow.grad = gradient_of(parameter, 2), gradient_of(parameter, 2)
    optimizer.step()
    twin_optimizer.step()
    assert torch.equal(parameter, shadow)
    PARTS[part](before).copy_(shadow.detach())
    assert torch.equal(base, before), "what is outside the parameter has changed"


@pytest.mark.parametrize("layout", GRADIENTS)
@pytest.mark.parametrize("part", ["columns", "transposed", "all", "a number", "nothing"])
@pytest.mark.parametrize("make", ["AdamW", "LAMB", "8-bit"])
def test_gradients_lie_in_memory_as_they_like(make: str, part: str, layout: str) -> None:
    _, optimizer_of = FORMATS[make]
    parameter = nn.Parameter(PARTS[part](base_of()))
    shadow = nn.Parameter(parameter.detach().clone())
    optimizer, twin_optimizer = optimizer_of([parameter], **SETTINGS), optimizer_of([shadow], **SETTINGS)
    parameter.grad = GRADIENTS[layout](gradient_of(parameter, 0))
    shadow.grad = parameter.grad.resolve_neg().clone(memory_format=torch.contiguous_format)
    kept = shadow.grad.clone()
    optimizer.step()
    twin_optimizer.step()
    assert torch.equal(parameter, shadow)
    assert torch.equal(parameter.grad, kept)


def test_a_gradient_in_the_memory_of_a_parameter_is_refused_before_anything_changes() -> None:
    base = base_of()
    first, second = nn.Parameter(base[:6]), nn.Parameter(base[6:12])
    optimizer = AdamW([first, second])
    for gradient in (first.detach(), base[3:9], base[6:7].expand(6)):
        first.grad, second.grad = torch.ones(6), gradient
        with pytest.raises(chunkc.UnsupportedError, match=r"parameter 1 of .* shares memory with .*clone"):
            optimizer.step()
        assert torch.equal(base, base_of())
        assert not optimizer.state[first]


def test_gradients_between_parameters_in_one_storage_are_ordinary() -> None:
    base = base_of().view(100, 6)
    mine = [nn.Parameter(base[:, 0]), nn.Parameter(base[:, 1])]
    shadow_copies = [nn.Parameter(p.detach().clone()) for p in mine]
    for number, (p, q) in enumerate(zip(mine, shadow_copies)):
        p.grad, q.grad = base[:, 2 + number], base[:, 2 + number].clone()
    AdamW(mine).step()
    AdamW(shadow_copies).step()
    assert all(torch.equal(p, q) for p, q in zip(mine, shadow_copies))


def test_a_parameter_of_another_shape_than_its_states_is_refused() -> None:
    first, parameter = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 3))
    optimizer = AdamW([first, parameter])
    for p in (first, parameter):
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = first.detach().clone()
    parameter.grad = None
    parameter.data = torch.ones(2, 3)
    parameter.grad = torch.ones(2, 3)
    with pytest.raises(chunkc.UnsupportedError, match=r"parameter 1 of .* has the shape \(2, 3\).*\(4, 3\)"):
        optimizer.step()
    assert torch.equal(first, before)


_SPANS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6)).map(lambda span: (span[0], sum(span))), max_size=6)


@given(_SPANS, _SPANS)
def test_spans_that_may_meet_are_found(spans: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    """None is missed, and of those that have elements none is found that does not meet."""
    common = any(begin < end and max(begin, a) < min(end, b) for begin, end in spans for a, b in others)
    assert _overlap(spans, others) or not common
    filled = [[span for span in side if span[0] < span[1]] for side in (spans, others)]
    assert _overlap(*filled) == common


# ---------------------------------------------------------------- no plain memory


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


ODD: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "rows at one place": lambda: (values()[0, :3].expand(4, 3), torch.ones(4, 3)),
    "a number at one place": lambda: (values()[0, :1].expand(5), torch.ones(5)),
    "windows, some at one place": lambda: (base_of().unfold(0, 5, 2), torch.ones(298, 5)),
    "another layout": lambda: (torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse_csr()),
    "without memory": lambda: (torch.empty(5, 5, device="meta"), torch.ones(5, 5, device="meta")),
    "a wrapper": lambda: (Wrapped(values()), torch.ones(5, 5)),
    "zeros": lambda: (MADE_PLAIN["zeros"](), torch.ones(5, 5)),
    "a sparse gradient": lambda: (values(), values().to_sparse()),
    "a gradient that is a wrapper": lambda: (values(), Wrapped(values())),
    "a freed gradient": lambda: (values(), freed()),
}
"""A parameter and its gradient. As long as it is not trained, it may be anything."""


@pytest.mark.parametrize("make", [AdamW, Adam, LAMB])
@pytest.mark.parametrize("kind", ODD)
def test_odd_memory_is_refused_before_anything_changes(make: Any, kind: str) -> None:
    first, (data, gradient) = nn.Parameter(torch.ones(3)), ODD[kind]()
    optimizer = make([first, nn.Parameter(data)])
    optimizer.step()
    first.grad, optimizer.param_groups[0]["params"][1].grad = torch.ones(3), gradient
    message = "of shape .* make it of a clo" if "at one place" in kind else ""
    message = "make the embedding with sparse=False" if kind == "a sparse gradient" else message
    for call in (optimizer.step, optimizer.grad_norm) if "gradient" in kind else (optimizer.step,):
        with pytest.raises(chunkc.UnsupportedError, match=f"parameter 1 of parameter group 0.*{message}"):
            call()
    assert torch.equal(first, torch.ones(3))
    assert "at one place" not in kind or torch.equal(data, ODD[kind]()[0])
    assert not any(optimizer.state.values())


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
