"""A small model under `chunkc.optim`: plain, placed or adopted by a compiled call; and its copy under `torch.optim`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness import array, segmented
from torch import Tensor, nn

import chunkc
from chunkc.session.session import owner

WIDTH, LAYERS = 128, 4
BUDGET_NBYTES = 400 * 1024
"""The model data below is 1 MiB: no weight can stay on the compute tier."""
TWO_PER_CHUNK = {"chunk_size": 2 * 4 * WIDTH * WIDTH, "memory_budget": 600 * 1024}
"""Options with which two fp32 weights share a chunk."""
MODES = ("plain", "placed", "adopted")
"""Ordinary PyTorch; placed, then compiled; compiled only, so that parameters move at the first call."""
OPTIMIZERS = {
    "AdamW": (chunkc.optim.AdamW, torch.optim.AdamW),
    "Adam": (chunkc.optim.Adam, torch.optim.Adam),
}
ALL_OPTIMIZERS = OPTIMIZERS | {"SGD": (chunkc.optim.SGD, torch.optim.SGD)}
Optimizer = torch.optim.Optimizer
NAN = float("nan")
WITHOUT_SENSE: dict[str, list[Any]] = {
    "lr": [
        *(-1.0, NAN, "1", None, True, [1e-3], 1j, 10**400),
        *(torch.tensor(NAN), torch.ones(2), torch.tensor(True), torch.ones((), device="meta")),
    ],
    "betas": [(1.0, 0.9), (0.9, -0.1), None, 0.9, "ab", (0.9,), (0.9, NAN), (False, 0.9)],
    "eps": [-1e-8, "1e-8", NAN],
    "weight_decay": [-0.1, None, NAN],
    "maximize": ["no", None],
}
"""Hyper-parameters of Adam's kind that are refused."""


class MLP(nn.Module):
    """Weights large enough to live in chunks, and biases that are too small for it."""

    def __init__(self, num_layers: int = LAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x.float() - 1).square().mean()


def build(mode: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> tuple[MLP, Callable]:
    """Return the model, and the callable to train it by."""
    torch.manual_seed(seed)
    model = MLP().to(dtype)
    if mode == "plain":
        return model, model
    if mode == "placed":
        chunkc.place(model, chunk_size=options.get("chunk_size", "auto"))
    return model, segmented(model, **{"memory_budget": BUDGET_NBYTES, **options})


def batch(step: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def backward(call: Callable, step: int, dtype: torch.dtype = torch.float32) -> None:
    call(batch(step, dtype)).backward()


def train(call: Callable, optimizer: Optimizer, steps: range, dtype: torch.dtype = torch.float32) -> None:
    for step in steps:
        backward(call, step, dtype)
        optimizer.step()
        optimizer.zero_grad()


def is_managed(parameter: Tensor) -> bool:
    session, name = owner(parameter) or (None, "")
    return session is not None and session.store.views.is_managed(name)


def assert_managed(model: MLP, mode: str) -> None:
    """Check that weights are in chunks, or in `plain` mode that they are not."""
    assert all(is_managed(layer.weight) == (mode != "plain") for layer in model.layers)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]


def states(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{kind}": value.detach().clone()
        for name, p in model.named_parameters()
        for kind, value in optimizer.state[p].items()
    }


def results(model: nn.Module, *optimizers: Optimizer) -> list[np.ndarray]:
    """Return parameters, and their states in an order that is always the same."""
    parameters = list(model.parameters())
    states = [of.state[p] for of in optimizers for p in parameters]
    return [array(p) for p in parameters] + [array(state[kind]) for state in states for kind in sorted(state)]


def through_a_file(value: Any) -> Any:
    """Save a value and load it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def twin_of(model: MLP) -> MLP:
    """Copy the weights into plain PyTorch."""
    shadow = MLP().to(next(model.parameters()).dtype)
    shadow.load_state_dict(model.state_dict())
    return shadow


def copy_gradients(model: nn.Module, shadow: nn.Module) -> None:
    for p, q in zip(model.parameters(), shadow.parameters()):
        q.grad = None if p.grad is None else p.grad.detach().clone()


def assert_close(model: nn.Module, shadow: nn.Module, atol: float = 1e-6) -> None:
    for (name, p), q in zip(model.named_parameters(), shadow.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def several_groups(model: MLP) -> list[dict[str, Any]]:
    """Return parameter groups with different settings for weights and biases that are neighbours in chunks."""
    first, second, third, fourth = model.layers
    return [
        {"params": [first.weight, third.bias], "lr": 1e-2, "weight_decay": 0.0},
        {"params": [second.weight, second.bias], "betas": (0.8, 0.95), "weight_decay": 0.3},
        {"params": [third.weight, first.bias], "lr": 3e-3, "eps": 1e-6},
        {"params": fourth.parameters(), "lr": 5e-3, "maximize": True},
    ]
