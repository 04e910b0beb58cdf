"""What `chunkc.explain` says of layers that ranks compute together is what ranks do; see `layer_cases`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_ranks import ranks

from chunkc.cli import main

SCRIPT = "layer_cases.py"


def check(found: list[dict[str, Any]]) -> None:
    """To the byte for the ranks that have the largest parts, the first two of four."""
    for rank, one in enumerate(found):
        assert "error" not in one, one["traceback"]
        for run in one["runs"]:
            said, planned = run["explained"], run["ranks"]
            assert "is distributed already: explain the model as it is before" in run["distributed already"]
            assert planned["minimum"] == said["minimum"]
            if rank < 2:
                assert planned == said
            assert planned["peak"] <= said["peak"], "less where the optimizer's step is the peak"
            assert planned["home"] <= said["home"]
            assert run["measured"] == planned["peak"]
            explained, made = run["plans"]
            assert explained == made


@pytest.mark.second_tier
def test_two_rows_of_layers_plan_and_measure_what_was_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In stages forced and chosen, with room for all and none to spare. The command, without ranks, says it too."""
    found = ranks(tmp_path, "layers", num_ranks=4, script=SCRIPT)["layers"]
    check(found)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as on these ranks; some operators take memory for each
    roomy = found[0]["runs"][0]
    subject = f"{Path(__file__).with_name(SCRIPT)}:subject"
    ask = ["explain", subject, "--hardware", "cpu", "--mesh", "1x2x2", "--zero-stage", "3", "--format", "json"]
    for budget, expected in (("1GiB", roomy), (str(roomy["ranks"]["minimum"]), found[0]["runs"][1])):
        assert main([*ask, "--memory-budget", budget]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["predicted_peak_nbytes"] == expected["ranks"]["peak"]
        assert said["minimum_budget_nbytes"] == expected["ranks"]["minimum"]
        assert said["plan_text"].partition("\nplan:")[0].strip() == expected["plans"][1]


@pytest.mark.slow
def test_copies_plan_and_measure_what_was_explained(tmp_path: Path) -> None:
    check(ranks(tmp_path, "copies", num_ranks=4, script=SCRIPT)["copies"])


@pytest.mark.slow
def test_a_cube_of_ranks_plans_and_measures_what_was_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of two parts of what each of two ranks of a layer has."""
    found = ranks(tmp_path, "copies", num_ranks=8, script=SCRIPT)["copies"]
    check(found)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    subject = f"{Path(__file__).with_name(SCRIPT)}:subject"
    ask = ["explain", subject, "--hardware", "cpu", "--mesh", "2x2x2", "--zero-stage", "3", "--format", "json"]
    assert main([*ask, "--memory-budget", "1GiB"]) == 0
    said, (planned,) = json.loads(capsys.readouterr().out), found[0]["runs"]
    assert said["predicted_peak_nbytes"] == planned["ranks"]["peak"]
    assert said["minimum_budget_nbytes"] == planned["ranks"]["minimum"]
