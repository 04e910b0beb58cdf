"""Render the rewritten FX graphs, with their chunk nodes, as readable code."""

from __future__ import annotations

from chunkc.ir.explanation import Explanation
from chunkc.ir.units import short_nbytes

_RULE = "# " + "-" * 78


def render_graph(explanation: Explanation) -> str:
    """Render each graph below a comment with its calls, its fullest moment, and the phase's copies."""
    parts = [
        _comment(f"{explanation.model} on {explanation.hardware}, codegen {explanation.codegen}", *_state(explanation))
    ]
    for phase, code in explanation.graphs.items():
        parts.append(f"{_RULE}\n{_comment(phase, *_phase(explanation, phase))}\n{_RULE}\n{code.strip()}")
    if not explanation.graphs:
        parts.append(_comment("no graph: this explanation has none"))
    return "\n\n".join(parts) + "\n"


def _state(explanation: Explanation) -> tuple[str, str]:
    planned = "" if explanation.fits else "; does not fit: the graphs are those of the plan for the smallest budget"
    return (
        f"budget {explanation.memory_budget_nbytes:,} bytes, smallest {explanation.minimum_budget_nbytes:,}{planned}",
        f"predicted peak {explanation.predicted_peak_nbytes:,} bytes at {explanation.peak.moment}",
    )


def _phase(explanation: Explanation, phase: str) -> list[str]:
    moments = [moment for moment in explanation.moments if moment.call.startswith(f"{phase}.")]
    copies = [event for event in explanation.events if event.phase == phase and event.nbytes]
    lines = []
    if moments:
        fullest = max(moments, key=lambda moment: moment.nbytes)
        where = " in ".join(filter(None, (fullest.op, fullest.module)))
        lines.append(f"calls: {len({moment.call for moment in moments})}, operations: {len(moments)}")
        lines.append(f"fullest at {fullest.call}: {fullest.nbytes:,} bytes, {where}")
    for kind in dict.fromkeys(event.kind for event in copies):
        nbytes = [event.nbytes for event in copies if event.kind == kind]
        lines.append(f"{kind}: {len(nbytes)} {'copy' if len(nbytes) == 1 else 'copies'}, {short_nbytes(sum(nbytes))}")
    return lines


def _comment(*lines: str) -> str:
    return "\n".join(f"# {line}" for text in lines for line in text.splitlines())
