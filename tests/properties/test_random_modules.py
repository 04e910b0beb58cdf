"""Random modules, chunk sizes and budgets: always the bits of a budget in which everything fits."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from harness import HUGE, TINY, assert_same_training, refuse, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from zoo import Batch, Case, integers

import chunkc

LENGTH = 8
KINDS = ("linear", "norm", "conv", "residual", "again", "frozen", "unused", "embedding", "half_frozen", "dropout")


@dataclass(frozen=True)
class Recipe:
    """A random module: the kind of each layer, width, vocabulary, whether head and embedding are one."""

    kinds: tuple[str, ...]
    width: int
    vocabulary: int
    tied_head: bool


class RandomModule(nn.Module):
    """The layers of a recipe in order; "again" calls an earlier linear layer a second time."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, width = recipe, recipe.width
        self.embedding = nn.Embedding(recipe.vocabulary, width)
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(_layer(kind, recipe) for kind in recipe.kinds)
        self.head = nn.Linear(width, recipe.vocabulary, bias=False)
        if recipe.tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.embedding(x)))
        for kind, layer in zip(self.recipe.kinds, self.layers):
            if kind == "again":
                hidden = torch.tanh(self.first(hidden))
            elif kind == "conv":
                hidden = hidden + layer(hidden.transpose(1, 2)).transpose(1, 2)
            elif kind == "residual":
                hidden = hidden + layer(hidden)
            elif kind == "embedding":
                hidden = hidden + layer(x)
            elif kind != "unused":
                hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def _layer(kind: str, recipe: Recipe) -> nn.Module:
    width = recipe.width
    if kind == "norm":
        return nn.LayerNorm(width)
    if kind == "conv":
        return nn.Conv1d(width, width, 3, padding=1)
    if kind == "residual":
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    if kind == "again":
        return nn.Identity()
    if kind == "embedding":
        return nn.Embedding(recipe.vocabulary, width)
    if kind == "dropout":
        return nn.Dropout(0.2)
    layer = nn.Linear(width, width)
    layer.requires_grad_(kind != "frozen")
    layer.bias.requires_grad_(kind not in ("frozen", "half_frozen"))
    return layer


def _case(recipe: Recipe) -> Case:
    def batch(seed: int) -> Batch:
        shape = (2, LENGTH)
        return {"x": integers(seed, shape, recipe.vocabulary), "y": integers(seed + 1000, shape, recipe.vocabulary)}

    return Case("random", lambda: RandomModule(recipe), batch)


RECIPES = st.builds(
    Recipe,
    kinds=st.lists(st.sampled_from(KINDS), max_size=6).map(tuple),
    width=st.sampled_from((24, 32, 64, 100)),  # also widths that fill no alignment unit
    vocabulary=st.sampled_from((17, 128, 1000)),
    tied_head=st.booleans(),
)


SOME, MANY = (
    settings(
        max_examples=num_examples, deadline=None, derandomize=True, print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    for num_examples in (8, 80)
)  # fmt: skip
TRAINING = given(
    recipe=RECIPES,
    chunk_nbytes=st.sampled_from([1 << power for power in range(12, 21)]),
    fraction=st.floats(0.0, 1.0),
    home=st.sampled_from(("cpu", "disk")),
    activations=st.sampled_from(("keep", "auto", "offload", "rerun")),
    overlap=st.sampled_from(("none", "backward")),
)


@pytest.mark.second_tier
@SOME
@TRAINING
def test_random_modules_train_to_the_same_bits(
    recipe: Recipe, chunk_nbytes: int, fraction: float, home: str, activations: str, overlap: str
) -> None:
    check(recipe, chunk_nbytes, fraction, home, activations, overlap)


def test_a_group_with_a_parameter_that_gets_no_gradient() -> None:
    """It stays, and its other gradients are not used up in the backward: they need room."""
    recipe = Recipe(("norm", "unused", "norm"), width=64, vocabulary=128, tied_head=True)
    check(recipe, 65536, 0.9, "cpu", "keep", "backward")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@MANY
@TRAINING
def test_many_random_modules(
    recipe: Recipe, chunk_nbytes: int, fraction: float, home: str, activations: str, overlap: str
) -> None:
    check(recipe, chunk_nbytes, fraction, home, activations, overlap)


def check(recipe: Recipe, chunk_nbytes: int, fraction: float, home: str, activations: str, overlap: str) -> None:
    """`fraction` of the way from the minimum to everything, inside a hard limit."""
    case = _case(recipe)
    shared = {"chunk_size": chunk_nbytes, "whole_graph": "never", "steps": 2}
    everything = train(case, memory_budget=HUGE, limit=False, **shared)
    how = {"home": home, "activations": activations}
    minimum = refuse(case, memory_budget=TINY, chunk_size=chunk_nbytes, **how).minimum_nbytes
    budget = max(minimum, round(minimum + fraction * (everything.predicted_peak_nbytes - minimum)))
    updating = functools.partial(chunkc.optim.AdamW, lr=1e-3, weight_decay=0.1, overlap=overlap)
    result = train(case, memory_budget=budget, optimizer=updating, with_grads=overlap != "backward", **how, **shared)
    everything = everything if result.grads else replace(everything, grads=())
    assert_same_training(result, everything)
    assert result.measured_peak_nbytes <= result.predicted_peak_nbytes <= budget
