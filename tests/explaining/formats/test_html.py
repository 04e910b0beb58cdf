"""The page and its picture, as data, and that a browser would fetch nothing. How it looks is for eyes to check."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from typing import Any

import numpy as np
import pytest
from synthetic import MIB, MOMENTS, large, measured, moment, not_fitting, small

from chunkc.explaining.formats import render_html
from chunkc.explaining.formats.figure import KIND_COLOURS, MAX_DRAWN, MAX_SOURCE, thinned
from chunkc.ir.errors import UnsupportedError
from chunkc.ir.explanation import KINDS, Explanation

plotly = pytest.importorskip("plotly")


def traces(explanation: Explanation) -> dict[str, Any]:
    from chunkc.explaining.formats.figure import build_figure

    return {trace.name or f"hover {trace.yaxis}": trace for trace in build_figure(explanation).data}


def test_areas_hold_the_bytes_of_each_kind() -> None:
    found = traces(small())
    assert list(found["activations"].y) == [30, 50, 60, 20, 0, 0]
    assert np.allclose(found["activations"].x, [2e-3, 4e-3, 5e-3, 9e-3, 11e-3, 12e-3])
    areas = [name for name, trace in found.items() if trace.type == "scatter" and trace.stackgroup]
    assert areas == ["parameters", "slots", "activations", "temporaries"]
    assert set(KIND_COLOURS) == set(KINDS)


def test_the_budget_and_the_smallest_one_are_lines() -> None:
    assert list(traces(small())["budget 200.00 MiB"].y) == [200, 200]
    assert not any(name.startswith("smallest budget") for name in traces(small()))
    assert list(traces(not_fitting())["smallest budget 190.00 MiB"].y) == [190, 190]


def test_bars_cover_each_event_once() -> None:
    prefetch = traces(small())["prefetch"]
    x, y = np.array(prefetch.x)[:8].reshape(2, 4), np.array(prefetch.y)[:8].reshape(2, 4)
    assert np.allclose(x[:, [0, 2]] * 1e3, [[0, 2], [2, 4]])
    assert (np.ptp(y, axis=1) > 0.5).all()
    assert {"forward", "backward", "update", "prefetch", "write back", "stall"} <= traces(small()).keys()


def test_hover_names_operation_module_and_source() -> None:
    said = set(traces(small())["hover y"].text)
    assert len(said) == len(small().moments)
    assert any("aten.gelu" in text and "model.layers.0" in text and "model.py:12" in text for text in said)
    assert any("aten.&lt;sum&gt;" in text for text in said), "names are no HTML"


def test_a_line_of_code_is_shown_as_it_is_written_and_a_long_one_is_cut() -> None:
    def hover_of(source: str) -> str:
        moments = tuple(dataclasses.replace(moment, source=source) for moment in MOMENTS)
        return str(traces(small(moments=moments))["hover y"].text[0])

    assert '<br>net.py:3, gelu(x, "tanh")<br>' in hover_of('net.py:3, gelu(x, "tanh")')
    assert "net.py:3, x &lt; y &amp; z" in hover_of("net.py:3, x < y & z")
    long = f"net.py:3, {'x + ' * 50}"
    assert f"{long[: MAX_SOURCE - 1]}…<br>" in hover_of(long)
    assert long not in hover_of(long)


def test_hover_names_chunk_and_bytes_on_each_stream() -> None:
    from chunkc.explaining.formats.figure import build_figure

    points = [trace for trace in build_figure(small()).data if trace.meta == "hover" and trace.yaxis == "y2"]
    assert [len(set(trace.text)) for trace in points] == [4, 2, 1]
    assert any("prefetch param:2" in text and "20.00 MiB" in text for text in points[1].text)
    assert "write back grad:1" in points[2].text[0]
    assert min(points[2].x) > 8e-3, "inside the event"
    assert max(points[2].x) < 10e-3


def test_measured_bytes_are_a_line_and_measured_events_have_streams() -> None:
    found = traces(small(measured=measured()))
    line = np.array(found["measured, each call's peak"].y)
    assert np.allclose(line[:4], [110, 110, 188, 188])
    assert np.isnan(line[4:]).all(), "what was not metered is not drawn"
    assert "measured, each call's peak" not in traces(small(measured=measured(moments=())))
    from chunkc.explaining.formats.figure import build_figure

    axis = build_figure(small(measured=measured())).layout
    assert list(axis.yaxis2.ticktext)[:2] == ["compute", "compute, measured"]
    assert axis.xaxis.range[1] == pytest.approx(13.2e-3), "the longer of the two sides is seen whole"


def test_thinning_keeps_the_peak() -> None:
    moments = [moment("forward.0", f"op{i}", float(i), activations=(i * 7919) % 1009) for i in range(5000)]
    few = thinned(moments, 700)
    assert len(few) <= 700
    assert max(m.nbytes for m in few) == max(m.nbytes for m in moments)
    assert [m.start_s for m in few] == sorted(m.start_s for m in few)
    assert thinned(moments, 5000) == tuple(moments)


def test_many_moments_are_still_few_traces() -> None:
    explanation = large(600, 7)
    assert len(explanation.moments) > MAX_DRAWN
    found = traces(explanation)
    assert len(found) < 20
    assert len(found["activations"].x) <= MAX_DRAWN + 1
    gaps = int(np.isnan(np.array(found["prefetch"].x)).sum())
    assert gaps == 1, "every gap costs the browser a shape of its own"
    assert "of each 3 of the 16,800 moments the fullest is drawn" in render_html(explanation)


def test_the_page_stands_alone() -> None:
    page = render_html(small(model="<b>m</b> $model"))
    assert "&lt;b&gt;m&lt;/b&gt; $model on testbench" in page
    assert re.search(r"<script[^>]*\bsrc=", page) is None
    assert re.search(r"<link\b", page) is None
    assert "fits, with 10.00 MiB" in page
    assert "is drawn" not in page
    assert f"{190 * MIB:,}" in page
    assert json.dumps("sendChartToCloud") in page.split("modeBarButtonsToRemove")[-1]


def test_an_explanation_without_moments_is_a_page_too() -> None:
    assert "</html>" in render_html(small(moments=(), events=()))


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "plotly" else found(name))
    with pytest.raises(UnsupportedError, match=r'pip install "chunkc\[html\]"'):
        render_html(small())
