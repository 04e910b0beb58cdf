"""The published results as explain sees them: the largest batch by bisection, rows saved and taken up again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from plans import headline

import chunkc


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
