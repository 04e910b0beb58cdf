"""What part of a model a graph is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

NEARLY_ALL = 0.8
"""A graph with so much of what a model trains is all of it: the rest may be there for other steps."""


def graph_fraction(models: Iterable[nn.Module], inputs: Iterable[Any]) -> float:
    """The part of what models train that is among a graph's inputs, by elements; 1: all of it, or nothing at all.

    The same on all ranks: a distributed parameter counts as a whole.
    """
    own = {id(value): value.numel() for value in inputs if isinstance(value, nn.Parameter) and value.requires_grad}
    numel = sum(p.numel() for model in models for p in model.parameters() if p.requires_grad)
    found = sum(own.values()) / max(1, numel)
    return found if 0 < found < NEARLY_ALL else 1.0
