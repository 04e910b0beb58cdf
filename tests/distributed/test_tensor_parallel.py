"""Layers that ranks compute together, cut over others by chunkc: see `tensor_cases` for what they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_ranks import ranks

slow = pytest.mark.slow


@pytest.mark.second_tier
@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [
        ("as_one_process", 2),
        ("lamb_as_one_process", 2),
        ("copies", 4),
        pytest.param("copies", 8, marks=slow),
        pytest.param("in_all_ways", 4, marks=slow),
        pytest.param("lamb_in_all_ways", 4, marks=slow),
        pytest.param("many_layers", 2, marks=slow),
        pytest.param("other_sizes", 2, marks=slow),
        pytest.param("overflow", 2, marks=slow),
        pytest.param("saved", 2, marks=slow),
        pytest.param("saved", 4, marks=slow),
        pytest.param("refused", 2, marks=slow),
    ],
)
def test_ranks_of_a_layer_train_as_one_process_does(case: str, num_ranks: int, tmp_path: Path) -> None:
    """With columns, rows and parts of the batch, with room for all and with none to spare inside a hard limit. By LAMB,
    too, whose norms are of whole tensors. Meshes of three dimensions have copies: with eight ranks a cube, two copies
    of two parts of what each of two ranks of a layer has."""
    ranks(tmp_path, case, num_ranks=num_ranks, script="tensor_cases.py")
