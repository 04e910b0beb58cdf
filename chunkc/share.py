"""What part of a model a graph is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

NEARLY_ALL = 0.8
"""A graph with so much of what a model trains is all of it: the rest may be there for other steps."""


def share_of(model: nn.Module | None, inputs: Iterable[Any]) -> float:
    """The part of a model's trained elements that are among a graph's inputs; 1: all of them, or none at all.

    The same on all ranks: a distributed parameter counts as a whole.
    """
    own = {id(value): value.numel() for value in inputs if isinstance(value, nn.Parameter) and value.requires_grad}
    numel = 0 if model is None else sum(p.numel() for p in model.parameters() if p.requires_grad)
    found = sum(own.values()) / max(1, numel)
    return found if 0 < found < NEARLY_ALL else 1.0
