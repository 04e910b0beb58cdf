from __future__ import annotations

import io
from pathlib import Path

import pytest
from synthetic import small

from chunkc.explaining.formats import FORMATS, render, write
from chunkc.ir.errors import OptionsError


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
