"""Render a self-contained page with the verdict, the figure and the text, which loads no other resource."""

from __future__ import annotations

import html
import importlib.util
from string import Template

from chunkc.explaining.formats.figure import MAX_DRAWN, build_figure, run_length
from chunkc.explaining.formats.text import headline, render_text
from chunkc.explaining.formats.units import short_seconds
from chunkc.ir.errors import UnsupportedError
from chunkc.ir.explanation import Explanation
from chunkc.ir.units import short_nbytes

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
:root { --ink: #1b1e24; --faint: #5b6270; --paper: #ffffff; --card: #f3f4f7; --line: #d9dce3;
  --good: #1a7f37; --bad: #c4231c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ee; --faint: #9aa2b1; --paper: #14161b; --card: #1e2129; --line: #343945;
    --good: #4ac26b; --bad: #ff7b72; }
}
body { margin: 0 auto; padding: 20px 24px; max-width: 1500px; font: 15px/1.45 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 21px; margin: 0 0 2px; overflow-wrap: anywhere; }
p { margin: 0 0 14px; }
.faint, dt { color: var(--faint); }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 8px; margin: 0 0 14px; }
dl div { background: var(--card); border-radius: 7px; padding: 7px 12px; }
dt { font-size: 13px; }
dd { margin: 0; font-size: 17px; font-variant-numeric: tabular-nums; }
details { border-top: 1px solid var(--line); margin-top: 14px; padding-top: 10px; }
summary { cursor: pointer; }
pre { overflow-x: auto; font: 13px/1.4 ui-monospace, "DejaVu Sans Mono", monospace; }
</style>
</head>
<body>
<h1>$title</h1>
<p class="faint">$subtitle</p>
<p class="$mood">$verdict</p>
<dl>$cards</dl>
$figure
<details open><summary>The same as text</summary><pre>$text</pre></details>
</body>
</html>
""")

_CONFIG = {"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["sendChartToCloud"]}
"""Plotly's configuration. The removed button would send the chart to a server."""

_AFTER = """
const page = document.getElementById("{plot_id}");
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const measured = page.data.findIndex(trace => trace.meta === "measured");
function paint() {
  const style = getComputedStyle(document.documentElement);
  const of = name => style.getPropertyValue(name).trim();
  const axis = {gridcolor: of("--line"), zerolinecolor: of("--line"), linecolor: of("--line")};
  const change = {"font.color": of("--ink"), "hoverlabel.bgcolor": of("--card"), "hoverlabel.bordercolor": of("--line"),
    "hoverlabel.font.color": of("--ink"), "xaxis.spikecolor": of("--faint"), "paper_bgcolor": of("--paper"),
    "plot_bgcolor": of("--paper"), "modebar.bgcolor": of("--paper"), "modebar.color": of("--faint"),
    "modebar.activecolor": of("--ink")};
  for (const name of ["xaxis", "yaxis", "yaxis2"])
    for (const key in axis) change[name + "." + key] = axis[key];
  const narrow = page.clientWidth < 700;
  change["legend.font.size"] = change["legend2.font.size"] = narrow ? 10 : 12;
  if (measured >= 0) Plotly.update(page, {"line.color": of("--ink")}, change, [measured]);
  else Plotly.relayout(page, change);
}
dark.addEventListener("change", paint);
paint();
"""


def render_html(explanation: Explanation) -> str:
    """Render the page; some five million characters of it are plotly's code.

    Raises:
        UnsupportedError: plotly is not installed.
    """
    if importlib.util.find_spec("plotly") is None:
        raise UnsupportedError('the html format draws with plotly: pip install "chunkc[html]"')
    figure = build_figure(explanation).to_html(
        full_html=False,
        include_plotlyjs=True,
        include_mathjax=False,
        config=_CONFIG,
        post_script=_AFTER,
    )
    good = explanation.fits and explanation.host_fits
    cards = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in _cards(explanation))
    return _PAGE.substitute(
        title=html.escape(f"{explanation.model} on {explanation.hardware}"),
        subtitle=html.escape(
            f"{explanation.num_parameters:,} parameters, codegen {explanation.codegen}{_drawn(explanation)}"
        ),
        mood="good" if good else "bad",
        verdict=html.escape(headline(explanation)),
        cards=cards,
        figure=figure,
        text=html.escape(render_text(explanation)),
    )


def _drawn(explanation: Explanation) -> str:
    """Say what the figure shows, unless it shows every moment of the plan for the budget."""
    num = len(explanation.moments)
    run = run_length(num, MAX_DRAWN)
    plan = "" if explanation.fits else "; this is the plan for the smallest budget"
    fewer = f"; of each {run} of the {num:,} moments the fullest is drawn" if run > 1 else ""
    return plan + fewer


def _cards(explanation: Explanation) -> list[tuple[str, str]]:
    time, traffic = explanation.step_time_s, explanation.traffic_nbytes
    measured = explanation.measured
    cards = [
        ("budget", short_nbytes(explanation.memory_budget_nbytes)),
        ("smallest budget", short_nbytes(explanation.minimum_budget_nbytes)),
        ("predicted peak", short_nbytes(explanation.predicted_peak_nbytes)),
    ]
    if measured is not None and measured.peak_nbytes is not None:
        cards.append(("measured peak", short_nbytes(measured.peak_nbytes)))
    return [
        *cards,
        ("at home", short_nbytes(explanation.home_nbytes)),
        ("copied in a step", short_nbytes(traffic.to_device + traffic.to_home)),
        ("one step", short_seconds(time.total)),
        ("of it stall", short_seconds(time.stall)),
    ]
