"""What `chunkc.explain` says of layers that ranks compute together is what ranks do; see `layer_cases`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import ranks

from chunkc.cli.command import main

SCRIPT = "layer_cases.py"
Explained = Callable[[str, str | int], dict[str, Any]]


def check_peak_and_minimum(said: dict[str, Any], run: dict[str, Any]) -> None:
    assert said["predicted_peak_nbytes"] == run["peak"]
    assert said["minimum_budget_nbytes"] == run["minimum"]


@pytest.fixture
def explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Explained:
    """What the command, without ranks, says of a mesh of them and a budget."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as on these ranks; some operators take memory for each
    ask = ["explain", f"{Path(__file__).with_name(SCRIPT)}:subject", "--hardware", "cpu", "--zero-stage", "3"]

    def said(mesh: str, budget: str | int) -> dict[str, Any]:
        assert main([*ask, "--format", "json", "--mesh", mesh, "--memory-budget", str(budget)]) == 0
        return json.loads(capsys.readouterr().out)

    return said


@pytest.mark.second_tier
@pytest.mark.parametrize("case", ["layers", pytest.param("layers_otherwise", marks=pytest.mark.slow)])
def test_two_rows_of_layers_plan_and_measure_what_was_explained(
    case: str, tmp_path: Path, explained: Explained
) -> None:
    """In stages forced and chosen, with room for all and none to spare. The command, without ranks, says it too."""
    in_stage_3, *_ = ranks(tmp_path, case, num_ranks=4, script=SCRIPT)[case]
    said = explained("1x2x2", "1GiB" if case == "layers_otherwise" else in_stage_3["minimum"])
    check_peak_and_minimum(said, in_stage_3)
    assert said["plan_text"].partition("\nplan:")[0].strip() == in_stage_3["plan"]


@pytest.mark.slow
def test_copies_plan_and_measure_what_was_explained(tmp_path: Path) -> None:
    ranks(tmp_path, "copies", num_ranks=4, script=SCRIPT)


@pytest.mark.slow
def test_a_cube_of_ranks_plans_and_measures_what_was_explained(tmp_path: Path, explained: Explained) -> None:
    """Two copies of two parts of what each of two ranks of a layer has."""
    found, *_ = ranks(tmp_path, "copies", num_ranks=8, script=SCRIPT)["copies"]
    check_peak_and_minimum(explained("2x2x2", "1GiB"), found)
