"""Formats of explanations: files and streams, JSON, graphs as Python, folded names, units."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import GRAPHS, large, measured, small

from chunkc.explaining.formats import FORMATS, parse_json, read_explanation, render, render_graph, render_json, write
from chunkc.explaining.formats.fold import by_kind, fold, fold_names
from chunkc.explaining.formats.units import byte_unit, share, short_seconds
from chunkc.ir.errors import OptionsError
from chunkc.ir.explanation import Explanation
from chunkc.ir.units import short_nbytes

# --- formats ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_formats_are_the_promised_ones() -> None:
    assert list(FORMATS) == ["text", "json", "graph", "html", "trace"]


@pytest.mark.parametrize("name", ["text", "json", "graph", "trace"])
def test_files_streams_and_standard_output_get_the_same(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = render(small(), name)
    path, stream = tmp_path / "out", io.StringIO()
    write(small(), name, path)
    write(small(), name, stream)
    write(small(), name)
    assert path.read_text() == stream.getvalue() == capsys.readouterr().out == expected


def test_text_on_a_terminal_is_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    write(small(), "text", stream)
    assert "\x1b[" in stream.getvalue()


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="no format 'pdf': use one of text, json, graph, html, trace"):
        write(small(), "pdf")
    with pytest.raises(OptionsError, match=r"cannot write .*: No such file or directory"):
        write(small(), "text", tmp_path / "no" / "where")


# --- json ---


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


# --- graph ---


def test_it_is_python_with_one_function_for_each_phase() -> None:
    tree = ast.parse(render_graph(small()))
    assert [type(node) for node in tree.body] == [ast.FunctionDef] * len(GRAPHS)
    for node, code in zip(tree.body, GRAPHS.values()):
        assert ast.unparse(node) == ast.unparse(ast.parse(code))


def test_a_name_of_several_lines_stays_a_comment() -> None:
    ast.parse(render_graph(small(model="a\nb = (")))


# --- fold ---


def test_layers_that_differ_in_one_number_become_one_line() -> None:
    lines = fold({f"model.layers.{i}": 10 for i in range(40)} | {"model.norm": 3})
    assert [str(line) for line in lines] == ["model.layers.* (x40)", "model.norm"]
    assert [line.nbytes for line in lines] == [400, 3]


def test_a_name_joins_its_larger_family() -> None:
    names = [f"h.{block}.mlp.{part}" for block in range(12) for part in range(2)]
    assert {str(line) for line in fold(dict.fromkeys(names, 1))} == {"h.*.mlp.0 (x12)", "h.*.mlp.1 (x12)"}


def test_kinds_and_numbers_inside_words_stay_apart() -> None:
    contents = {"activations: h.0": 1, "temporaries: h.1": 2, "conv1": 3, "conv2": 4}
    assert {str(line) for line in fold(contents)} == set(contents)


names = st.lists(st.sampled_from(["h", "mlp", "0", "1", "2", "17", "conv1"]), min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(names, st.integers(0, 1 << 40), max_size=30))
def test_no_byte_and_no_name_is_lost(contents: dict[str, int]) -> None:
    lines = fold(contents)
    assert sum(line.nbytes for line in lines) == sum(contents.values())
    assert sum(line.count for line in lines) == len(contents)
    assert [line.nbytes for line in lines] == sorted((line.nbytes for line in lines), reverse=True)


def test_by_kind_adds_up_what_stands_before_the_colon() -> None:
    assert by_kind({"slots: param:1": 5, "activations: a": 4, "activations: b": 4, "others": 1}) == {
        "activations": 8,
        "slots": 5,
        "others": 1,
    }


def test_chunk_names_become_ranges() -> None:
    assert fold_names(["param:3", "param:1", "param:2", "grad:7", "param:9", "tied", "param:1"]) == (
        "tied, grad:7, param:1-3, param:9"
    )


# --- units ---


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1536, "1.50 KiB"),
        (-(3 << 20), "-3.00 MiB"),
        (5 << 30, "5.00 GiB"),
        (1 << 41, "2.00 TiB"),
    ],
)
def test_bytes(nbytes: int, text: str) -> None:
    assert short_nbytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (1.234, "1.23 s"), (123.4, "123 s"), (4321.0, "4,321 s"), (0.0456, "45.6 ms"), (7.89e-6, "7.89 us")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert short_seconds(seconds) == text


def test_a_time_below_a_microsecond_is_not_nothing() -> None:
    assert short_seconds(2e-9) == "0.002 us"


def test_share_and_axis_unit() -> None:
    assert (share(1, 8), share(1, 0)) == ("12.5 %", "")
    assert byte_unit(3 << 30) == ("GiB", 1 << 30)
    assert byte_unit(1 << 30) == ("MiB", 1 << 20)
    assert byte_unit(7) == ("bytes", 1)
