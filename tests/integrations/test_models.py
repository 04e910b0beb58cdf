"""What models of all kinds do in a training loop, beside plain PyTorch: losses, gradients, and what is said between.

Tied weights, parameters unused in some steps, idle experts and graph breaks have tests in `end_to_end`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import array, gradients, in_a_small_budget, limited
from loops import LENGTH, VOCAB, gpt
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from zoo import floats, integers

import chunkc

WIDTH = 64


class Swish(torch.autograd.Function):
    """With a backward of its own, which scales by 0.5: nothing else gives these gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * torch.sigmoid(x) @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gate = torch.sigmoid(x)
        inner = 0.5 * gradient @ weight.T
        return inner * gate * (1 + x * (1 - gate)), 0.5 * ((x * gate).flatten(0, -2).T @ gradient.flatten(0, -2))


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + Swish.apply(x, weight)
        return x.square().mean()


class Stack(nn.Module):
    """Layers with residuals."""

    def __init__(self, make: Callable[[], nn.Module], num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make() for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(x)
            x = x + torch.tanh(out[0] if isinstance(out, tuple) else out)
        return x.square().mean()


class Attention(nn.Module):
    """`nn.MultiheadAttention` with its weights asked for and a padding mask, key and value of their own widths."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDTH, 4, kdim=32, vdim=16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        padded = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        padded[:, -2:] = True
        y, shares = self.own(x, x, x, key_padding_mask=padded, need_weights=True)
        z, _ = self.cross(y, x[..., :32], x[..., :16], need_weights=False)
        return (x + y + z).square().mean() + shares.square().mean()


class Recurrent(nn.Module):
    def __init__(self, make: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.first, self.rnn = nn.Linear(WIDTH, WIDTH), make(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.last = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(torch.relu(self.first(x)))[0]).square().mean()


def square() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "function": OwnFunction,
    "weight_norm": lambda: Stack(lambda: parametrizations.weight_norm(square())),
    "former_weight_norm": lambda: Stack(lambda: nn.utils.weight_norm(square())),
    "spectral_norm": lambda: Stack(lambda: parametrizations.spectral_norm(square())),
    "orthogonal": lambda: Stack(lambda: parametrizations.orthogonal(square(), orthogonal_map="matrix_exp"), 24),
    "cayley": lambda: Stack(lambda: parametrizations.orthogonal(square(), orthogonal_map="cayley")),
    "attention": Attention,
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "lstm": lambda: Recurrent(nn.LSTM),
}
SECOND_TIER = ("function", "weight_norm", "attention")


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def trained(model: nn.Module, call: Any, optimizer: type[torch.optim.Optimizer], lengths: tuple[int, ...]) -> list[Any]:
    """Losses and gradients of steps between which the model is evaluated in every way."""
    update, seen = optimizer(model.parameters(), lr=1e-3), list[Any]()
    for step, length in enumerate(lengths):
        x = floats(step, (2, length, WIDTH))
        loss = call(x)
        loss.backward()
        seen += [array(loss), gradients(model)]
        update.step()
        update.zero_grad()
        call.eval()
        with torch.no_grad():
            seen.append(array(call(x)))
        with torch.inference_mode():
            seen.append(array(call(x).clone()))
        call.train()
    return seen


def assert_alike(left: Any, right: Any) -> None:
    """To the rounding of another order of operations."""
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        left, right = list(left.values()), [right[key] for key in left]
    if isinstance(left, list):
        assert len(left) == len(right)
        for pair in zip(left, right):
            assert_alike(*pair)
        return
    np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-3 * max(abs(right).max(), 1e-4))


def in_budget(make: Callable[[], nn.Module], loop: Callable[[nn.Module], list[Any]]) -> list[Any]:
    """Run a loop on a model that is compiled in place, under a small budget of which all is counted."""

    def run(budget: int) -> list[Any]:
        torch._dynamo.reset()
        model = chunkc.place(make())
        options = {"memory_budget": budget, "codegen": "eager", "whole_graph": "never", "activations": "keep"}
        model.compile(backend="chunkc", options=options)
        with limited(budget):
            found = loop(model)
        report = chunkc.report(model)
        assert report.predicted_peak_nbytes <= report.memory_budget_nbytes
        assert report.num_resident_chunks < report.num_chunks
        return found

    return in_a_small_budget(run)


def assert_trains_alike(make: Callable[[], nn.Module], lengths: tuple[int, ...]) -> None:
    plain = built(make)
    expected = trained(plain, plain, torch.optim.AdamW, lengths)
    found = in_budget(lambda: built(make), lambda model: trained(model, model, chunkc.optim.AdamW, lengths))
    assert_alike(found, expected)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.second_tier if n in SECOND_TIER else pytest.mark.slow) for n in MODELS],
)
def test_trains_and_answers_as_plain_pytorch(name: str) -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        assert_trains_alike(MODELS[name], (8, 8, 8))


class Inverse(nn.Module):
    """Of a matrix in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(self.layer(x)).square().mean()


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_matrix_that_has_no_inverse_is_an_error(codegen: str) -> None:
    """As in PyTorch, in training and without gradients; what is inverted before and after is right."""
    model = built(Inverse)
    compiled = torch.compile(model, backend="chunkc", options={"codegen": codegen})
    for seed in (0, 1):
        x = floats(seed, (2, WIDTH, WIDTH))
        assert_alike(array(compiled(x)), array(model(x)))
        x[1] = 0
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"linalg\.inv: a matrix of the batch"):
                compiled(x)


@pytest.mark.slow
def test_an_rnn_that_dynamo_leaves_alone_trains_from_its_home_views() -> None:
    plain = built(lambda: Recurrent(nn.GRU))
    expected = trained(plain, plain, torch.optim.AdamW, (8, 8))
    torch._dynamo.reset()
    model = chunkc.place(built(lambda: Recurrent(nn.GRU)))
    compiled = torch.compile(model, backend="chunkc", options={"memory_budget": "1MiB", "codegen": "eager"})
    assert_alike(trained(model, compiled, chunkc.optim.AdamW, (8, 8)), expected)


@pytest.mark.slow
def test_lengths_that_vary() -> None:
    assert_trains_alike(Attention, (8, 5, 12, 7, 12))


# --- generation ---


def generated(model: nn.Module, **settings: Any) -> list[list[int]]:
    prompt = integers(4, (2, 6), VOCAB)
    model.eval()
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, pad_token_id=0, **settings)
    model.train()
    return found.tolist()


def steps_and_texts(model: nn.Module, optimizer: type[torch.optim.Optimizer], **settings: Any) -> list[Any]:
    update, seen = optimizer(model.parameters(), lr=1e-2), list[Any]()
    for step in range(2):
        ids = integers(step, (2, LENGTH), VOCAB)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        update.step()
        update.zero_grad()
        seen += [loss.item(), generated(model, **settings)]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"do_sample": False, "use_cache": True}, {"do_sample": False, "use_cache": False},
                 {"num_beams": 2, "do_sample": False, "use_cache": True}], ids=str,
)  # fmt: skip
def test_generates_between_steps_with_its_cache(settings: dict[str, Any]) -> None:
    expected = steps_and_texts(gpt(), torch.optim.AdamW, **settings)
    found = in_budget(gpt, lambda model: steps_and_texts(model, chunkc.optim.AdamW, **settings))
    assert found[1::2] == expected[1::2]
    assert found[::2] == pytest.approx(expected[::2], rel=1e-3)
