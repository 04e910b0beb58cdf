"""A watched gradient is unused until code outside of chunkc uses it, and an ordinary tensor from then on."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from chunkc.runtime.store.watched_gradients import is_unused, unwatched, watch


def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.ones(4))
    made.grad = torch.arange(4.0)
    watch(made.grad)
    return made


def gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad


USES: dict[str, Callable[[nn.Parameter], object]] = {
    "a function": lambda p: torch.norm(gradient(p)),
    "a method": lambda p: gradient(p).norm(),
    "in place": lambda p: gradient(p).mul_(2),
    "an operator": lambda p: gradient(p) * 2,
    "lists": lambda p: torch._foreach_norm([gradient(p)]),
    "nested lists": lambda p: torch.einsum("i,i->", [gradient(p), gradient(p)]),
    "a keyword": lambda p: torch.add(torch.ones(4), other=gradient(p)),
    "into another": lambda p: torch.ones(4).add_(gradient(p)),
    "data": lambda p: gradient(p).data,
    "a shape": lambda p: gradient(p).shape,
    "an element": lambda p: gradient(p)[0],
    "setting an element": lambda p: gradient(p).__setitem__(0, 1.0),
    "an array": lambda p: gradient(p).numpy(),
    "NumPy's array": lambda p: np.asarray(gradient(p)),
    "DLPack": lambda p: torch.from_dlpack(gradient(p)),
    "an address": lambda p: gradient(p).data_ptr(),
    "a storage": lambda p: gradient(p).untyped_storage(),
    "print": lambda p: repr(gradient(p)),
    "a copy": lambda p: copy.deepcopy(gradient(p)),
    "pickle": lambda p: pickle.dumps(gradient(p)),
    "saving": lambda p: torch.save(gradient(p), io.BytesIO()),
    "clipping": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "other data": lambda p: setattr(gradient(p), "data", torch.zeros(4)),
    "compiled code": lambda p: torch.compile(lambda q: q.grad.norm(), backend="eager", fullgraph=True)(p),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_every_use_is_noticed_and_has_the_ordinary_result(use: Callable[[nn.Parameter], object]) -> None:
    watched, plain = parameter(), nn.Parameter(torch.ones(4))
    plain.grad = torch.arange(4.0)
    before = watched.grad
    assert is_unused(gradient(watched))
    found, expected = use(watched), use(plain)
    assert watched.grad is before
    assert type(watched.grad) is Tensor
    assert torch.equal(gradient(watched), gradient(plain))
    assert type(found) is type(expected)


def test_what_no_use_is() -> None:
    """What an optimizer's `zero_grad`, loops over parameters and chunkc itself do."""
    p = parameter()
    assert p.grad is not None
    assert isinstance(p.grad, Tensor)
    assert {p.grad: 1}
    with unwatched():
        assert gradient(p).data_ptr() > 0
        assert gradient(p).norm() > 0
        assert gradient(p)._version == 0
    assert is_unused(gradient(p))


def test_views_from_before_count_as_uses() -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.arange(4.0)
    view = p.grad.view(2, 2)
    watch(p.grad)
    assert not is_unused(p.grad)
    del view
    watch(p.grad)
    assert is_unused(p.grad)


def test_addition_by_autograd_counts_a_version() -> None:
    p = parameter()
    with unwatched():
        before = gradient(p)._version
    (p * 2).sum().backward()
    with unwatched():
        assert gradient(p)._version > before


def test_a_class_of_the_user_counts_as_used() -> None:
    class Own(Tensor):
        pass

    own = torch.ones(3).as_subclass(Own)
    watch(own)
    assert type(own) is Own
    assert not is_unused(own)
