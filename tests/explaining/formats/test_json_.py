from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic import large, measured, small

from chunkc.explaining.formats import parse_json, read_explanation, render_json
from chunkc.ir.errors import OptionsError
from chunkc.ir.explanation import Explanation


@pytest.mark.parametrize("explanation", [small(), small(measured=measured()), large(20)], ids=["small", "run", "large"])
def test_what_is_written_is_read_back(explanation: Explanation, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(render_json(explanation))
    assert read_explanation(path) == explanation


def test_each_event_has_a_line_of_its_own() -> None:
    lines = render_json(small()).splitlines()
    assert sum(line.startswith('  {"stream"') for line in lines) == len(small().events)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{\n nonsense", "is not JSON: line 2"),
        ("[1, 2]", "is no chunkc explanation"),
        ('{"fits": true}', "is no chunkc explanation"),
        ('{"version": 99}', "has version 99"),
        ('{"version": 1, "model": "m"}', "not a chunkc explanation: hardware"),
        (render_json(small()).replace('"fits": true', '"fits": "maybe"'), "not a chunkc explanation: fits"),
    ],
)
def test_a_wrong_text_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(OptionsError, match=says) as caught:
        parse_json(text, name="old.json")
    assert str(caught.value).startswith("old.json ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("figure", ["INF", "nan"])
def test_a_number_that_is_not_finite_is_refused(figure: str) -> None:
    values = json.loads(render_json(small()))
    values["step_time_s"]["total"] = figure  # a text that pydantic takes for a number
    with pytest.raises(OptionsError, match="one of its numbers is not finite"):
        parse_json(json.dumps(values))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"cannot read .*gone\.json: No such file"):
        read_explanation(tmp_path / "gone.json")
    with pytest.raises(OptionsError, match=r"cannot read .*: Is a directory"):
        read_explanation(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionsError, match="binary is not JSON"):
        read_explanation(tmp_path / "binary")
