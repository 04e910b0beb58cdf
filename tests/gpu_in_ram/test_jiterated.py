"""Operators that ATen compiles at their first call, by NVRTC: it does so here, and the device takes what it made."""

from __future__ import annotations

from collections.abc import Callable

import cuda_in_ram
import pytest
import torch
from torch import Tensor

NAMES = (
    "exp2", "erfc", "erfinv", "lgamma", "digamma", "i0", "sinc", "special.bessel_j0", "special.entr", "special.i1e",
    "special.log_ndtr", "special.ndtri",
)  # fmt: skip


def polygamma(x: Tensor) -> Tensor:
    return torch.polygamma(2, x)


def zeta(x: Tensor) -> Tensor:
    return torch.special.zeta(x + 2, x)


def gcd(x: Tensor) -> Tensor:
    return torch.gcd((x * 100).int(), torch.full((), 12, device=x.device, dtype=torch.int32))


def prod(x: Tensor) -> Tensor:
    return torch.complex(x, x).reshape(-1, 4).prod(1)


def angle(x: Tensor) -> Tensor:
    return torch.complex(x, x).angle()


def magnitude(x: Tensor) -> Tensor:
    return torch.complex(x, x).abs()


def named(name: str) -> Callable[[Tensor], Tensor]:
    found = torch
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[return-value]


OPERATORS = {
    **{name: named(name) for name in NAMES},
    **{function.__name__: function for function in (polygamma, zeta, gcd, prod, angle, magnitude)},
}


def values() -> Tensor:
    return torch.rand(64, generator=torch.Generator().manual_seed(0)) * 0.9 + 0.05


@pytest.mark.parametrize("name", OPERATORS)
def test_memory(name: str) -> None:
    x = values().to("cuda")
    torch.cuda.synchronize()
    before_nbytes = torch.cuda.memory_allocated()
    found = OPERATORS[name](x)
    torch.cuda.synchronize()
    assert found.shape == OPERATORS[name](values()).shape
    assert torch.cuda.memory_allocated() - before_nbytes == -(-found.nbytes // 512) * 512


@pytest.mark.arithmetic
@pytest.mark.parametrize("name", OPERATORS)
def test_values(name: str) -> None:
    with cuda_in_ram.choose(late=1):
        found = OPERATORS[name](values().to("cuda")).cpu()
    assert found.equal(OPERATORS[name](values()))
