"""DeepSpeed's engine on two ranks, beside one process; see `engine_rank_cases` for what they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_ranks import ranks


@pytest.mark.second_tier
def test_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    """Losses, the norm of all ranks' gradients, schedule, clipping, and steps that overflow."""
    script = "engine_rank_cases.py"
    two = ranks(tmp_path, "stages", "groups", script=script)
    (tmp_path / "one").mkdir()
    (one,) = ranks(tmp_path / "one", "stages", num_ranks=1, script=script)["stages"]
    for rank in two["stages"]:
        for stage in ("stage 1", "stage 3"):
            found, expected = rank[stage], one[stage]
            for key in ("losses", "norms"):
                assert found[key] == pytest.approx(expected[key], abs=3e-6)
            assert found["lr"] == expected["lr"]
            assert found["samples"] == [16, 4, 48], "of all ranks, of a call, of all ranks"
            assert found["skipped"] == [0, 1.0]
        found, expected = rank["fp16"], one["fp16"]
        assert found["losses"] == pytest.approx(expected["losses"], abs=2e-2), "fp16 has 11 bits"
        assert found["skipped"] == expected["skipped"]
        assert 0 < found["skipped"][0] < 6
        del rank["seconds"]
    assert len({json.dumps(rank) for rank in two["stages"]}) == 1, "ranks know the same"


@pytest.mark.second_tier
def test_ranks_train_with_offload_to_disks(tmp_path: Path) -> None:
    ranks(tmp_path, "on_disks", script="engine_rank_cases.py")
