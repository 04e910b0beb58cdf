"""What the pointer shows of a line of code: as it is written, and no more than there is room for."""

from __future__ import annotations

import dataclasses

import pytest
from synthetic import MOMENTS, small

pytest.importorskip("plotly")

from chunkc.explaining.formats.figure import MAX_SOURCE, build_figure


def hover_of(source: str) -> str:
    moments = tuple(dataclasses.replace(moment, source=source) for moment in MOMENTS)
    trace = next(t for t in build_figure(small(moments=moments)).data if t.meta == "hover" and t.yaxis == "y")
    return trace.text[0]


def test_quotes_are_shown_as_they_are() -> None:
    assert '<br>net.py:3, gelu(x, "tanh")<br>' in hover_of('net.py:3, gelu(x, "tanh")')


def test_markup_is_not_taken_for_markup() -> None:
    assert "net.py:3, x &lt; y &amp; z" in hover_of("net.py:3, x < y & z")


def test_a_long_line_is_cut() -> None:
    line = f"net.py:3, {'x + ' * 50}"
    shown = hover_of(line)
    assert f"{line[: MAX_SOURCE - 1]}…<br>" in shown
    assert line not in shown
