"""Draw the demonstration's results: a table and loss curves in a terminal; losses and memory as PNG files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BARS = "▁▂▃▄▅▆▇█"
_NUM_BARS = 50
_MIB = 2**20
MeasuredMoment = tuple[str, int, int | None]
"""What runs at a moment, the bytes predicted for it, and the bytes measured then (None: not measured)."""


def results_table(summary: Mapping[str, Any]) -> Table:
    """Plain and chunkc side by side."""
    table = Table(title=f"GPT of {summary['num_parameters'] / 1e6:.1f}M parameters, {len(summary['losses'])} steps")
    for column in ("", "plain torch.compile", "chunkc under the budget", "chunkc, no limit"):
        table.add_column(column, justify="right" if column else "left")

    def mib(key: str) -> str:
        return f"{summary[key] / 2**20:.1f} MiB"

    def seconds(key: str) -> str:
        return f"{summary[key]:.2f} s"

    to_device, to_home = (summary["traffic_nbytes"][way] for way in ("to_device", "to_home"))
    curves = [summary[key] for key in ("plain_losses", "losses", "unlimited_budget_losses")]
    table.add_row("memory budget", "none", mib("memory_budget_nbytes"), "none")
    table.add_row("predicted peak", "", mib("predicted_peak_nbytes"), "")
    table.add_row("measured peak", mib("plain_peak_nbytes"), mib("measured_peak_nbytes"), "")
    step_keys = ("plain_step_time_s", "step_time_s", "unlimited_budget_step_time_s")
    table.add_row("time per step (median)", *(seconds(key) for key in step_keys))
    table.add_row("compilation", seconds("plain_compile_time_s"), seconds("compile_time_s"), "")
    table.add_row("chunks", "", f"{summary['num_chunks']} x {mib('chunk_size_nbytes')}", "")
    table.add_row("moved in and out, in all", "", f"{to_device / 2**20:.0f} and {to_home / 2**20:.0f} MiB", "")
    last = len(curves[0]) - 1
    for step in sorted({0, last // 3, 2 * last // 3, last}):
        table.add_row(f"loss at step {step + 1}", *(f"{curve[step]:.6f}" for curve in curves))
    return table


def sparkline(values: Sequence[float], *, low: float, high: float) -> str:
    """At most 50 bars, each a value or the mean of a few, from `low` to `high`; "?" where not finite."""
    width = -(-len(values) // _NUM_BARS) or 1
    bars = []
    for start in range(0, len(values), width):
        value = fmean(values[start : start + width])
        share = (value - low) / (high - low) if high > low else 0.0
        is_finite = math.isfinite(value)
        bars.append(_BARS[min(len(_BARS) - 1, max(0, int(share * len(_BARS))))] if is_finite else "?")
    return "".join(bars)


def loss_curves(summary: Mapping[str, Any]) -> str:
    """The three runs' losses, a line each, on one scale."""
    keys = {
        "plain_losses": "plain",
        "losses": "chunkc under the budget",
        "unlimited_budget_losses": "no limit",
    }
    finite = [loss for key in keys for loss in summary[key] if math.isfinite(loss)] or [0.0]
    low, high = min(finite), max(finite)
    lines = (f"{sparkline(summary[key], low=low, high=high)}  {name}" for key, name in keys.items())
    return f"loss, {high:.2f} to {low:.2f}:\n" + "\n".join(lines)


def draw_losses(path: Path, losses: Mapping[str, Sequence[float]]) -> None:
    """A PNG of one loss curve per name; later ones are dashed, thinner and on top."""
    figure, axes = _figure()
    for index, (name, values) in enumerate(losses.items()):
        style = "-" if index == 0 else "--"
        axes.plot(range(1, len(values) + 1), values, style, linewidth=max(1, 4 - 1.2 * index), label=name)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="The same losses in a part of the memory")
    axes.legend()
    figure.savefig(path)


def draw_memory(path: Path, moments: Sequence[MeasuredMoment], *, budget_nbytes: int, plain_peak_nbytes: int) -> None:
    """A PNG of predicted and measured bytes over the moments of a step, with the budget as a line."""
    figure, axes = _figure()
    axes.step(
        range(len(moments)),
        [predicted / _MIB for _, predicted, _ in moments],
        where="post",
        linewidth=3,
        alpha=0.5,
        label="predicted",
    )
    measured = [(at, nbytes / _MIB) for at, (_, _, nbytes) in enumerate(moments) if nbytes is not None]
    if measured:
        axes.plot(*zip(*measured), ".", markersize=3, color="black", label="measured")
    axes.axhline(budget_nbytes / _MIB, color="red", label=f"budget: {budget_nbytes / _MIB:.0f} MiB")
    axes.set(
        xlabel="moment of the step",
        ylabel="MiB",
        ylim=(0, None),
        title=f"One training step; plain torch.compile needs {plain_peak_nbytes / _MIB:.0f} MiB",
    )
    axes.legend(loc="lower right")
    figure.savefig(path)


def _figure() -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # takes a second, which only what draws needs

    figure = Figure(figsize=(10, 5), dpi=120, layout="constrained")
    return figure, figure.subplots()
