"""Whose own state a rank loads: of ranks that compute layers together, all have the same data."""

from __future__ import annotations

import pytest

from chunkc.checkpoint.restoring import _saved_rank


@pytest.mark.parametrize(
    ("of_a_layer", "saved_of_a_layer", "expected"),
    [
        (1, 1, [0, 1, 2, 3]),
        (2, 2, [0, 1, 2, 3]),
        (1, 2, [0, 2, 4, 6]),  # each row's data goes to one rank
        (2, 1, [0, 0, 1, 1]),  # each rank's data goes to a row
        (4, 2, [0, 1, 0, 0]),
        (2, 4, [0, 1, 4, 5]),
    ],
)
def test_the_rank_that_had_this_rank_s_data(of_a_layer: int, saved_of_a_layer: int, expected: list[int]) -> None:
    assert [_saved_rank(rank, of_a_layer, saved_of_a_layer) for rank in range(4)] == expected
