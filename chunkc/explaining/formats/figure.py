"""Draw an explanation: bytes over the step above, the streams' events below, on one time axis.

Each kind of bytes or events is one trace, however many moments and events there are: 10,000 rectangles of their own
would make a browser crawl. The pointer reads points of lines without width, one line for memory and one for each
stream. There is no WebGL, which not every browser has.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from chunkc.explaining.formats.units import byte_unit, short_seconds
from chunkc.ir.explanation import KINDS, STREAMS, ExplainedMoment, Explanation, TimedEvent
from chunkc.ir.units import short_nbytes

if TYPE_CHECKING:
    import plotly.graph_objects as go

MAX_DRAWN = 6_000
"""The most moments to draw. If there are more, neighbours are drawn as the fullest of them."""

NUM_HOVER_POINTS = 1000
"""Points that the pointer can find over the whole step, divided among moments or events by length, at least one
each."""

MAX_SOURCE = 64
"""Characters of a line of code that the pointer shows."""

_MANY = 1000
"""From so many moments on areas are outlined, so that no spike fades; from so many bars on a stream on, no bar is
widened."""

KIND_COLOURS: Mapping[str, str] = {
    "parameters": "#4269d0",
    "gradients": "#3ca951",
    "optimizer states": "#a463f2",
    "slots": "#6cc5b0",
    "activations": "#efb118",
    "temporaries": "#ff8ab7",
    "others": "#9498a0",
}
"""Kind of bytes -> colour; readable on white and on near black, and distinct for the colour-blind. Observable's
palette, 2024."""

EVENT_COLOURS: Mapping[str, str] = {
    "forward": "#4269d0",
    "backward": "#3ca951",
    "update": "#a463f2",
    "prefetch": "#6cc5b0",
    "write_back": "#efb118",
    "stall": "#ff725c",
}
"""Phase of a call, or kind of another event -> colour."""

Numbers = npt.NDArray[np.float64]

Trace = dict[str, Any]
"""A trace of a figure, as plotly reads it."""

_OTHER, _LIMIT, _MEASURED = "#9498a0", "#ff3b30", "#888888"
_HALF = 0.38
"""Half of a bar's height, where the distance of two streams is 1."""


def build_figure(explanation: Explanation) -> go.Figure:
    """Build the figure; needs plotly.

    Memory is on `y`, streams on `y2`; both share `x`, seconds from the beginning of the step.
    """
    import plotly.graph_objects as go

    end_s = _end_s(explanation)
    moments = thinned(explanation.moments, MAX_DRAWN)
    unit, scale = byte_unit(max(explanation.predicted_peak_nbytes, 1))
    figure = go.Figure()
    figure.add_traces([*_areas(moments, end_s, scale), *_limits(explanation, moments, end_s, scale)])
    figure.add_traces(list(_measured(explanation, moments, end_s, scale)))
    if moments:
        figure.add_trace(_moment_hover(moments, end_s, scale))
    lanes = list(_lanes(explanation))
    last_s = max([end_s, *(event.end_s for _, events in lanes for event in events)])
    figure.add_traces(list(_bars(lanes, last_s)))
    figure.add_traces([_event_hover(lane, events, row, end_s) for row, (lane, events) in enumerate(lanes) if events])
    _lay_out(figure, lanes=[lane for lane, _ in lanes], end_s=last_s, unit=unit, top=_top(explanation, scale))
    return figure


def thinned(moments: Sequence[ExplainedMoment], limit: int) -> tuple[ExplainedMoment, ...]:
    """Return at most `limit` moments: the fullest of each run of neighbours, so that the peak is among them."""
    run = run_length(len(moments), limit)
    if run <= 1:
        return tuple(moments)
    runs = (moments[begin : begin + run] for begin in range(0, len(moments), run))
    return tuple(max(neighbours, key=lambda moment: moment.nbytes) for neighbours in runs)


def run_length(num: int, limit: int) -> int:
    """Return the length of a run such that `num` moments make at most `limit` runs."""
    return -(-num // limit)


def _end_s(explanation: Explanation) -> float:
    ends = [explanation.step_time_s.total, *(event.end_s for event in explanation.events)]
    return max([*ends, *(moment.start_s for moment in explanation.moments), 1e-9])


def _top(explanation: Explanation, scale: int) -> float:
    """Return the top of the memory axis: it shows the budget, unless the peak would then lie in the lowest third."""
    peak = max([explanation.predicted_peak_nbytes, 1, *(moment.nbytes for moment in explanation.moments)])
    budget = explanation.memory_budget_nbytes
    return 1.12 * (budget if peak < budget <= 3 * peak else peak) / scale


def _areas(moments: Sequence[ExplainedMoment], end_s: float, scale: int) -> Iterator[Trace]:
    x = np.array([*(moment.start_s for moment in moments), end_s])
    for kind in KINDS:
        nbytes = [moment.contents.get(kind, 0) for moment in moments]
        if any(nbytes):
            colour = KIND_COLOURS[kind]
            line = {"width": 0 if len(moments) < _MANY else 0.6, "color": colour, "shape": "hv"}
            y = np.array([*nbytes, nbytes[-1]]) / scale
            yield _trace(x, y, kind, line=line, stackgroup="memory", fillcolor=colour)


def _limits(explanation: Explanation, moments: Sequence[ExplainedMoment], end_s: float, scale: int) -> Iterator[Trace]:
    """Yield lines for the budget, and for the smallest budget if nothing fits, and a mark at the peak."""
    lines = [("budget", explanation.memory_budget_nbytes, "dash")]
    if not explanation.fits:
        lines.append(("smallest budget", explanation.minimum_budget_nbytes, "dot"))
    for name, nbytes, dash in lines:
        line = {"color": _LIMIT, "width": 2, "dash": dash}
        yield _trace([0, end_s], [nbytes / scale] * 2, f"{name} {short_nbytes(nbytes)}", line=line)
    if moments:
        fullest, end = max(zip(moments, _ends_s(moments, end_s)), key=lambda pair: pair[0].nbytes)
        marker = {"symbol": "triangle-down", "size": 11, "color": _LIMIT, "line": {"width": 1, "color": "white"}}
        x, y, name = (fullest.start_s + end) / 2, fullest.nbytes / scale, f"peak {short_nbytes(fullest.nbytes)}"
        yield _trace([x], [y], name, mode="markers", marker=marker)


def _measured(
    explanation: Explanation, moments: Sequence[ExplainedMoment], end_s: float, scale: int
) -> Iterator[Trace]:
    """Yield the measured bytes of each call over its predicted time, to compare bytes; times are below."""
    if explanation.measured is None:
        return
    nbytes_of = dict(explanation.measured.moments)
    if not any(nbytes_of.get(moment.call) is not None for moment in moments):
        return
    y = [nbytes_of.get(moment.call) for moment in moments]
    yield _trace(
        np.array([*(moment.start_s for moment in moments), end_s]),
        np.array([np.nan if nbytes is None else nbytes / scale for nbytes in [*y, y[-1]]]),
        "measured, each call's peak",
        line={"color": _MEASURED, "width": 2, "shape": "hv"},
        meta="measured",
    )


def _trace(x: Sequence[float] | Numbers, y: Sequence[float] | Numbers, name: str, **settings: Any) -> Trace:
    """Return lines, or as `settings` say, that the legend of memory names and the pointer does not find."""
    common = {"type": "scatter", "mode": "lines", "legend": "legend", "hoverinfo": "skip"}
    return {**common, "x": x, "y": y, "name": name, **settings}


def _moment_hover(moments: Sequence[ExplainedMoment], end_s: float, scale: int) -> Trace:
    """Return invisible points along each moment, with its description."""
    x: list[float] = []
    y: list[float] = []
    text: list[str] = []
    for moment, end in zip(moments, _ends_s(moments, end_s)):
        inside = _inside(moment.start_s, end, end_s)
        x += inside
        y += [moment.nbytes / scale] * len(inside)
        text += [_moment_text(moment)] * len(inside)
    return _points(x, y, text, "y")


def _ends_s(moments: Sequence[ExplainedMoment], end_s: float) -> list[float]:
    return [*(moment.start_s for moment in moments[1:]), end_s]


def _inside(start: float, end: float, end_s: float) -> list[float]:
    """Return evenly spaced times between `start` and `end` for the pointer to find."""
    num = 1 + int(NUM_HOVER_POINTS * max(0.0, end - start) / end_s)
    return [start + (index + 0.5) / num * (end - start) for index in range(num)]


def _escaped(text: str) -> str:
    """Escape `<`, `>` and `&` for plotly, which shows other entities as they are written."""
    return html.escape(text, quote=False)


def _short(source: str) -> str:
    """Shorten a line of code to fit into a narrow window."""
    return source if len(source) <= MAX_SOURCE else f"{source[: MAX_SOURCE - 1]}…"


def _moment_text(moment: ExplainedMoment) -> str:
    where = "<br>".join(_escaped(part) for part in (moment.module, _short(moment.source)) if part)
    lines = [f"<b>{_escaped(moment.op)}</b>  {_escaped(moment.call)}", where]
    lines.append(f"<b>{short_nbytes(moment.nbytes)}</b>")
    lines += [
        f"<span style='color:{KIND_COLOURS[kind]}'>■</span> {kind} {short_nbytes(nbytes)}"
        for kind in KINDS
        if (nbytes := moment.contents.get(kind, 0))
    ]
    return "<br>".join(filter(None, lines))


def _lanes(explanation: Explanation) -> Iterator[tuple[str, tuple[TimedEvent, ...]]]:
    """Yield (label, events) of each stream, from the top; measured streams are below their predicted ones."""
    measured = explanation.measured.events if explanation.measured is not None else ()
    everything = [*explanation.events, *measured]
    streams = [*STREAMS, *dict.fromkeys(event.stream for event in everything if event.stream not in STREAMS)]
    for stream in streams:
        label = stream.replace("_", " ")
        yield label, tuple(event for event in explanation.events if event.stream == stream)
        if measured:
            yield f"{label}, measured", tuple(event for event in measured if event.stream == stream)


def _bars(lanes: Sequence[tuple[str, Sequence[TimedEvent]]], last_s: float) -> Iterator[Trace]:
    """Yield a trace per colour; the bars of a stream are one outline that runs along the lower edge between them.

    Gaps in a trace would be cheaper to write, but cost plotly a shape for each bar: seconds for 10,000.
    """
    for group in dict.fromkeys([*EVENT_COLOURS, *(_group(event) for _, events in lanes for event in events)]):
        outlines = []
        for row, (_, events) in enumerate(lanes):
            found = sorted((event.start_s, event.end_s) for event in events if _group(event) == group)
            if found:
                outlines += [_outline(found, -row - _HALF, -row + _HALF, last_s), np.full((1, 2), np.nan)]
        if not outlines:
            continue
        corners = np.concatenate(outlines)
        colour = EVENT_COLOURS.get(group, _OTHER)
        line = {"width": 0, "color": colour, "simplify": False}
        on_streams = {"yaxis": "y2", "legend": "legend2", "fill": "toself", "fillcolor": colour}
        yield _trace(corners[:, 0], corners[:, 1], group.replace("_", " "), line=line, **on_streams)


def _outline(spans_s: Sequence[tuple[float, float]], low: float, high: float, last_s: float) -> Numbers:
    """Return the corners [4 * bars, 2] of bars over `spans_s`; if they are few, each is wide enough to be seen."""
    thinnest_s = last_s / _MANY if len(spans_s) < _MANY else 0.0
    start_s, end_s = np.array(spans_s).T
    end_s = np.maximum(end_s, start_s + thinnest_s)
    corners = np.empty((len(spans_s), 4, 2))
    corners[:, :, 0] = np.stack([start_s, start_s, end_s, end_s], axis=1)
    corners[:, :, 1] = (low, high, high, low)
    return corners.reshape(-1, 2)


def _group(event: TimedEvent) -> str:
    return event.phase if event.kind == "call" else event.kind


def _event_hover(lane: str, events: Sequence[TimedEvent], row: int, end_s: float) -> Trace:
    x: list[float] = []
    text: list[str] = []
    for event in events:
        inside = _inside(event.start_s, event.end_s, end_s)
        x += inside
        text += [_event_text(lane, event)] * len(inside)
    return _points(x, [-float(row)] * len(x), text, "y2")


def _event_text(lane: str, event: TimedEvent) -> str:
    colour = EVENT_COLOURS.get(_group(event), _OTHER)
    what = event.name if event.kind == "call" else f"{event.kind.replace('_', ' ')} {event.name}"
    copied = short_nbytes(event.nbytes) if event.nbytes else ""
    length = short_seconds(event.end_s - event.start_s)
    extras = ", ".join(filter(None, (length, copied, event.module)))
    return f"<span style='color:{colour}'>■</span> {lane}: <b>{_escaped(what)}</b>, {_escaped(extras)}"


def _points(x: Sequence[float], y: Sequence[float], text: Sequence[str], yaxis: str) -> Trace:
    return {
        "type": "scatter",
        "x": np.array(x),
        "y": np.array(y),
        "yaxis": yaxis,
        "text": list(text),
        "mode": "lines",
        "line": {"width": 0, "color": _OTHER},
        "meta": "hover",
        "hovertemplate": "%{text}<extra></extra>",
        "showlegend": False,
    }


def _lay_out(figure: go.Figure, *, lanes: Sequence[str], end_s: float, unit: str, top: float) -> None:
    split = 0.36 if len(lanes) > len(STREAMS) else 0.27
    figure.update_layout(
        height=820,
        margin={"l": 8, "r": 16, "t": 70, "b": 8},
        modebar={"remove": ["select2d", "lasso2d"]},
        hovermode="x unified",
        hoversubplots="axis",
        hoverlabel={"align": "left", "namelength": -1},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        legend2={"orientation": "h", "y": -0.05, "yanchor": "top", "x": 0, "traceorder": "normal"},
        xaxis={
            "range": [0, end_s],
            "ticksuffix": "s",
            "tickformat": "~s",
            "hoverformat": ".4s",
        }
        | {"anchor": "y2", "showspikes": True, "spikemode": "across", "spikethickness": 1, "automargin": True},
        yaxis={"domain": [split + 0.03, 1.0], "range": [0, top], "title": {"text": unit}, "automargin": True},
        yaxis2={"domain": [0.0, split], "range": [-len(lanes) + 0.5, 0.5], "fixedrange": True, "automargin": True}
        | {
            "tickvals": [-row for row in range(len(lanes))],
            "ticktext": list(lanes),
            "showgrid": False,
            "zeroline": False,
        },
    )
