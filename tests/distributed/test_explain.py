"""What `chunkc.explain` says of ranks is what ranks do; see `explain_cases` for what they run."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_ranks import ranks

PADDING = 1.15
"""Chunks are gathered with the gaps that align parameters, which are no messages; these parameters are tiny."""


@pytest.mark.second_tier
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_plan_and_measure_what_was_explained(num_ranks: int, tmp_path: Path) -> None:
    """To the byte, in stages forced and chosen, with room for all and none to spare; rank 0 has the largest parts."""
    found = ranks(tmp_path, "explained", num_ranks=num_ranks, script="explain_cases.py")["explained"]
    for rank, one in enumerate(found):
        for run in one["runs"]:
            said, planned = run["explained"], run["ranks"]
            assert (
                "embed.weight is distributed already: explain the model as it is before" in run["distributed already"]
            )
            assert run["measured"] == planned["peak"]
            assert planned["minimum"] == said["minimum"]
            if rank == 0:
                assert planned == said
            assert planned["peak"] <= said["peak"], "less where the optimizer's step is the peak"
            assert planned["home"] <= said["home"]
            explained, made = run["plans"]
            assert explained == made
            if rank == 0:
                assert run["sent"] <= run["link"] < PADDING * run["sent"]
