"""Compiled once with symbols for sizes: bytes of every moment, and results, at many sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sympy
import torch
import torch.nn.functional as F
from symbolic_runs import Subject
from torch import nn

from chunkc.runtime import cpu_allocator


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    cpu_allocator.install()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(F.gelu(self.up(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.heads(x).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.norm(self.table(tokens)) @ self.table.weight.t()
        return F.cross_entropy(logits.view(-1, 50), targets.view(-1))


class Fallback(nn.Module):
    """Operators that Inductor leaves to ATen, between sums that it fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ordered = torch.sort((x * self.scale).sum(-1) * 2, dim=-1)[0]
        return torch.cumsum(ordered, 0) * 3 + torch.logsumexp(x, -1)


class Edges(nn.Module):
    """Views, what may be empty, what is padded."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.exp(x[2:])
        return rows, F.pad(x, (1, 2)).sum(0), torch.cat([x, x[:1] * 2]), (x * 2).view(-1), x.new_zeros(0, x.shape[0])


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def words(*shape: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(50, shape), torch.randint(50, shape)


SIZES = [(7, 5), (4, 2), (3, 31), (17, 4), (8, 13)]
CUT = ("mlp",)
"""Cut before products with each parameter; the others are whole, as far as segments may be."""
CASES = {
    "mlp": (Mlp, lambda b, s: (floats(b, s, 16),)),
    "attention": (Attention, lambda b, s: (floats(b, s, 16),)),
    "words": (Words, words),
    "fallback": (Fallback, lambda b, s: (floats(b, s, 6),)),
    "edges": (Edges, lambda b, s: (floats(b + 2, s),)),
}


def grads(module: nn.Module, args: tuple[torch.Tensor, ...], call) -> list[torch.Tensor]:
    """Results and gradients of parameters and inputs."""
    module.zero_grad()
    for tensor in args:
        tensor.grad = None
    result = call(*args)
    results = result if isinstance(result, tuple) else (result,)
    sum((r * r).sum() for r in results).backward()
    given = [t.grad for t in (*module.parameters(), *args) if t.grad is not None]
    return [r.detach() for r in results] + [g.clone() for g in given]


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_results_at_many_sizes(name: str) -> None:
    build, make = CASES[name]
    module = build()
    subject = Subject(module, whole=name not in CUT)
    for sizes in SIZES:
        args = make(*sizes)
        expected = grads(module, args, module)
        found = grads(module, args, subject)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not subject.differences
    graph = subject.graph  # compiled once
    assert graph.num_moments >= 3 * len(SIZES)
    assert len({tuple(sorted(shape.values())) for shape in graph.shapes}) >= len(SIZES)
    assert any(
        isinstance(step.nbytes, sympy.Expr) for part in graph.described.values() for step in part.compiled.memory.steps
    )
