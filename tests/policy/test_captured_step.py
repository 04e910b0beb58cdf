"""What is asked of a captured graph before any plan, and what part of a model it is: by trained elements, each once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from verify_cases import LAYOUT, captured_step

from chunkc.policy.captured_step import profile
from chunkc.policy.graph_fraction import NEARLY_ALL, graph_fraction

# --- captured step ---


CAPTURED = captured_step()


def test_the_bytes_of_a_forward_and_of_its_predecessors_outputs_are_its_own() -> None:
    """Input and output take 100 bytes each; the former call's outputs are in the forward's own bytes."""
    assert CAPTURED.external_in_forward(0, 0) == 0
    assert CAPTURED.external_in_forward(100, 100) == 0
    assert CAPTURED.external_in_forward(107, 0) == 7
    assert CAPTURED.external_in_forward(0, 4096) == 3996, "the input is a view of a larger tensor"
    assert CAPTURED.external_in_forward(107, 103) == 10


def test_a_profile_is_made_once_for_a_layout() -> None:
    captured = replace(CAPTURED)
    found = profile(captured, LAYOUT)
    assert profile(captured, LAYOUT) is found
    other = replace(LAYOUT, groups=(*LAYOUT.groups,))
    assert profile(captured, replace(LAYOUT, overhead_nbytes=1)) is found
    assert profile(captured, other) == found
    assert profile(captured, other) is not found


# --- graph fraction ---


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
