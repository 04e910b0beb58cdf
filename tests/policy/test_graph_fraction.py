"""What part of a model a graph is: by trained elements, each once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chunkc.policy.graph_fraction import NEARLY_ALL, graph_fraction


def test_trained_elements_count_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False))
    first, second, last = (layer.weight for layer in model)
    assert graph_fraction([model], [torch.randn(2), first]) == pytest.approx(1 / 4)
    assert graph_fraction([model], [first, second, first, 3]) == pytest.approx(1 / 2)
    last.requires_grad_(False)
    assert graph_fraction([model], [first, last]) == pytest.approx(1 / 2)


def test_nearly_all_is_all_and_so_is_nothing() -> None:
    model = nn.ParameterList(torch.randn(size) for size in (80, 20))
    assert NEARLY_ALL == 0.8
    assert graph_fraction([model], [model[0]]) == 1.0
    assert graph_fraction([model], [model[1]]) == pytest.approx(0.2)
    assert graph_fraction([model], []) == graph_fraction([], [model[1]]) == 1.0
