"""Operators that ATen compiles at their first call, by NVRTC: it does so here, and the device takes what it made."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import cuda_in_ram
import pytest
import torch
from torch import Tensor

NAMES = (
    "exp2", "erfc", "erfinv", "lgamma", "digamma", "i0", "sinc", "special.bessel_j0", "special.entr", "special.i1e",
    "special.log_ndtr", "special.ndtri",
)  # fmt: skip


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: attrgetter(name)(torch) for name in NAMES},
    "polygamma": lambda x: torch.polygamma(2, x),
    "zeta": lambda x: torch.special.zeta(x + 2, x),
    "gcd": lambda x: torch.gcd((x * 100).int(), torch.full((), 12, device=x.device, dtype=torch.int32)),
    "prod": lambda x: torch.complex(x, x).reshape(-1, 4).prod(1),
    "angle": lambda x: torch.complex(x, x).angle(),
    "magnitude": lambda x: torch.complex(x, x).abs(),
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
