"""Results as plots: a panel per section, a bar per row, quartiles as whiskers. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

METRICS = {
    # by suite, the first that a section has: (metric, factor, what its axis says, what to compare with)
    "fits": (("step", 1e3, "ms per step"), ("compilation", 1, "s to compile")),
    "disk": (("step", 1e3, "ms per step"),),
    "adam": (("throughput", 1e-9, "GB/s"),),
    "budget": (("tokens/s", 1, "tokens per second"),),
    "peers": (("tokens/s", 1, "tokens per second"),),
    "promise": (("tokens/s", 1, "tokens per second"),),
    "scale": (("parameters", 1e-9, "billion parameters"),),
    "checkpoint": (("to no saving", 100, "% of the time without saving"),),
    "ranks": (("step", 1e3, "ms per step"),),
    "prediction": (("measured to plan", 100, "% of the plan, measured"),),
}
_COLUMNS = 3
_HIGHLIGHT, _OTHER = "tab:blue", "silver"


def draw(result: Mapping[str, Any], path: Path) -> Path | None:
    """A PNG of a suite's result at `path`; None, and nothing written, where no section has what is drawn."""
    panels = [
        (section["title"], chosen, rows)
        for section in result["sections"]
        for chosen in METRICS[result["suite"]]
        if (rows := [row for row in section["rows"] if chosen[0] in row["metrics"]])
    ]
    if not panels:
        return None
    num_columns = min(_COLUMNS, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure = Figure(figsize=(6 * num_columns, 0.6 + 3.2 * num_rows), dpi=120, layout="constrained")
    all_axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axes, (title, (metric, factor, label), rows) in zip(all_axes, panels, strict=False):
        _bars(axes, title, rows, metric, factor, label)
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    figure.savefig(path)
    return path


def _bars(axes: Axes, title: str, rows: Sequence[Mapping[str, Any]], metric: str, factor: float, label: str) -> None:
    names = [", ".join(row["labels"].values()) for row in rows]
    medians = [row["metrics"][metric]["median"] * factor for row in rows]
    quartiles = [[q * factor for q in row["metrics"][metric]["quartiles"]] for row in rows]
    below = [max(0.0, median - first) for median, (first, _) in zip(medians, quartiles, strict=True)]
    above = [max(0.0, third - median) for median, (_, third) in zip(medians, quartiles, strict=True)]
    colours = [_HIGHLIGHT if name.startswith("chunkc") else _OTHER for name in names]
    axes.barh(range(len(rows)), medians, xerr=[below, above], color=colours, capsize=2)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_title(title[:60], fontsize=9)
