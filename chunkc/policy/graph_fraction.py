"""Compute a graph's fraction of its model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

NEARLY_ALL = 0.8
"""A graph with this fraction of the trained parameters counts as the whole model: the rest may be for other steps."""


def graph_fraction(models: Iterable[nn.Module], inputs: Iterable[Any]) -> float:
    """Return the fraction of the models' trained elements among a graph's inputs; 1: all of them, or none.

    The result is the same on all ranks: a distributed parameter counts as a whole.
    """
    own = {id(value): value.numel() for value in inputs if isinstance(value, nn.Parameter) and value.requires_grad}
    numel = sum(p.numel() for model in models for p in model.parameters() if p.requires_grad)
    fraction = sum(own.values()) / max(1, numel)
    return fraction if 0 < fraction < NEARLY_ALL else 1.0
