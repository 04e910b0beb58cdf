"""Plans of two revisions, compared; `bench/plans` in small: what slots between phases would gain, planning in each
round, and the published results as explain sees them, with the largest batch by bisection.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import replay
from peers.baselines import plan, timed
from plans import headline, seams

import chunkc

FOUND = {"smallest budget": {"fits": False, "minimum_budget_nbytes": 7, "events": ["to_device prefetch param:0 4"]}}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"minimum_budget_nbytes": 8}, "minimum_budget_nbytes: 7 at the base, 8 here"),
        ({"fits": True}, "fits: False at the base, True here"),
        ({"events": []}, "events: 1 lines differ"),
        ({"error": "BudgetError"}, "error: None at the base, BudgetError here"),
    ],
)
def test_each_difference_is_named(changed: dict[str, object], named: str) -> None:
    head = {"smallest budget": FOUND["smallest budget"] | changed}
    (line,) = replay.differences("gpt2", FOUND, head)
    assert line.startswith("gpt2, smallest budget: ")
    assert named in line
    assert list(replay.differences("gpt2", FOUND, FOUND)) == []
    of_one = [line.split(":")[0] for line in replay.differences("gpt2", {}, FOUND)]
    assert of_one == ["gpt2, smallest budget"] * 3


@pytest.mark.second_tier
def test_this_checkout_plans_as_its_base_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main(["--small", "--jobs", "1"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_updates_in_the_backward_gain_more_than_what_would_be_left() -> None:
    (case,) = seams.SMALL_CASES
    found, planned = seams.examine(case), plan(case, "none", "auto")
    assert planned.step is not None
    step_s, _ = timed(planned, planned.step, planned.step.phases)
    assert found.now_s == pytest.approx(step_s), "put together from its phases the step is what it was"
    assert found.early_s < min(found.backward_to_update_s, found.update_to_forward_s) <= found.now_s
    left = found.now_s - found.backward_to_update_s + found.now_s - found.update_to_forward_s
    assert 0 <= left < found.now_s - found.early_s


SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "plans" / "planning.py"


@pytest.mark.slow
def test_a_case_is_planned_alike_in_each_round(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--small", "--rounds", "2", "--out", str(out)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = json.loads(out.read_text())["cases"]
    assert found["digest"] in shown
    assert all(found[name] > 0 for name in ("first_s", "dry_run_s", "plans_s", "step_s"))


@pytest.fixture
def tiny() -> Any:
    """A claim small enough to be explained at once."""
    return headline.Claim("Nobody", 0.001, "rtx2060-6g", 2, 64, 4)


EXPLAINED: list[Any] = []
"""What was explained: of one batch size, which stands for all, since whether one fits is not looked at."""


def fake_explain(limit: int, asked: list[int]) -> Any:
    real = chunkc.explain

    def explain(model: Any, *args: Any, **options: Any) -> Any:
        asked.append(args[0].shape[0])
        if not EXPLAINED:
            EXPLAINED.append(real(model, *args, **options))
        return dataclasses.replace(EXPLAINED[0], fits=args[0].shape[0] <= limit)

    return explain


@pytest.mark.second_tier
@pytest.mark.parametrize(("limit", "batch_size"), [(0, 1), (1, 1), (3, 2), (8, 8), (99, 16)])
def test_the_largest_batch_that_fits(tiny: Any, monkeypatch: pytest.MonkeyPatch, limit: int, batch_size: int) -> None:
    asked: list[int] = []
    monkeypatch.setattr(headline.chunkc, "explain", fake_explain(limit, asked))
    finding = headline.explain_claim(tiny, lambda what: None)
    assert finding.batch_size == batch_size
    assert finding.to_row()["fits"] == (limit > 0)
    assert len(asked) <= 3


@pytest.mark.slow
def test_rows_are_saved_and_taken_up_again(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(headline, "CLAIMS", (tiny, dataclasses.replace(tiny, system="Somebody")))
    out = tmp_path / "found.json"
    assert headline.main(["--only", "nobody", "--out", str(out)]) == 0
    first = capsys.readouterr().out
    saved = json.loads(out.read_text())
    assert [row["claim"]["system"] for row in saved["rows"]] == ["Nobody"]
    assert saved["versions"]["torch"]
    assert "sequences of 1024 tokens" in saved["assumptions"]
    asked: list[int] = []
    monkeypatch.setattr(headline.chunkc, "explain", fake_explain(99, asked))
    assert headline.main(["--out", str(out)]) == 0
    both = capsys.readouterr().out
    assert both.startswith(first)
    assert len(asked) == 2, "only the second row was asked about"
    assert [row["claim"]["system"] for row in json.loads(out.read_text())["rows"]] == ["Nobody", "Somebody"]
    assert "| Somebody | rtx2060-6g | 0.001B | yes | 16 |" in both
