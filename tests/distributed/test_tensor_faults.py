"""Faults of ranks that compute layers together; see `tensor_fault_cases` for what they do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from run_ranks import ranks

SCRIPT = "tensor_fault_cases.py"

WHAT_RANKS_SAY = {
    "killed": ("rank 1 was gone", None),
    "killed_in_a_layer": ("^in a collective of a layer another rank was gone", None),
    "hung": ("rank 1 was gone, or did not come within 4 s", "rank 0 was gone"),
    "another_phase": ("differ in the phase: rank 1 of 2", "differ in the phase: rank 1 of 2"),
    "another_step": ("differ in the optimizer's steps, or in their hyper-parameters: rank 1 of 2", "rank 1 of 2"),
    "hooked_on_one": ("rank 1 was gone", "the gradient of embed.weight is looked at on its way"),
    "too_small_on_one": (
        "rank 1 of 2 cannot go on. BudgetError: memory_budget is 512 bytes",
        "the smallest that works",
    ),
    "another_codegen": ("differ in the options: rank 1 of 2", "rank 1 of 2"),
    "another_stage": ("differ in zero_stage: rank 1 of 2", "rank 1 of 2"),
    "lamb_of_others": ("differ in the chunks that LAMB updates", "differ in the chunks that LAMB updates"),
    "refused_on_one": (
        "^DistributedError: rank 1 of 2: extra.weight shares its memory.*\n"
        "DistributedError: rank 1 of 2: option 'home' is 'nowhere'.*\nnothing$",
        "^UnsupportedError: extra.weight shares its memory.*\nOptionsError: option 'home' is 'nowhere'.*\nnothing$",
    ),
}
"""By rank, of two that compute layers together; None: it was killed."""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return ranks(tmp_path_factory.mktemp("faults"), *WHAT_RANKS_SAY, script=SCRIPT)


@pytest.mark.second_tier
@pytest.mark.parametrize("case", WHAT_RANKS_SAY)
def test_all_ranks_of_a_layer_raise_an_error_in_time(case: str, faults: dict[str, list[dict[str, Any]]]) -> None:
    for found, expected in zip(faults[case], WHAT_RANKS_SAY[case], strict=True):
        if expected is None:
            assert found == {"error": "killed"}
            continue
        assert re.search(expected, found["message"]), found
        assert found.get("took", 0) < 15
        assert found.get("kept", True), "the model is what it was"


@pytest.mark.slow
def test_a_rank_that_stays_after_an_error_keeps_no_layer_waiting(tmp_path: Path) -> None:
    """On two rows of two ranks of a layer: whoever plans with the failed one, or computes with it, or neither."""
    cases = ("out_of_memory", "killed", "killed_in_a_layer", "hung", "hooked_on_one", "too_small_on_one")
    for case, found in ranks(tmp_path, *cases, num_ranks=4, script=SCRIPT).items():
        for number, rank in enumerate(found):
            if number == 1:
                continue
            assert rank["error"] == "DistributedError", (case, number, rank)
            assert rank.get("took", 0) < 15, (case, number, rank)
