"""Results as Markdown.

    python bench/report.py bench/results/fits-2026-01-31-1200.json [MORE.json ...]

A table per section: medians, and the quartiles in brackets where there are several samples.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

_MIB = 2**20
_GIB = 2**30
_MISSING = "–"
_NAMED_VERSIONS = frozenset({"python", "torch", "commit", "has_changes"})


def markdown(result: Mapping[str, Any]) -> str:
    """A suite's result, as `run.py` wrote it, in Markdown."""
    dry_run_state = " (small: no measurement)" if result["is_small"] else ""
    parts = [f"## {result['suite']}{dry_run_state}", _origin(result)]
    if not result["is_complete"]:
        parts.append("The run did not end: sections are missing.")
    for section in result["sections"]:
        parts += [f"### {section['title']}", _setting(section["setting"]), table(section["rows"])]
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table: labels, every metric that any row has, notes if there are any.

    Metrics come in the order of the row that has most of them.
    """
    labels = list(dict.fromkeys(name for row in rows for name in row["labels"]))
    fullest_first = sorted(rows, key=lambda row: -len(row["metrics"]))
    metrics = list(dict.fromkeys(name for row in fullest_first for name in row["metrics"]))
    has_notes = any(row["note"] for row in rows)
    header = [*labels, *metrics, *(["note"] if has_notes else [])]
    rule = [*("---" for _ in labels), *("---:" for _ in metrics), *(["---"] if has_notes else [])]
    lines = [header, rule]
    for row in rows:
        cells = [row["labels"].get(name, "") for name in labels]
        cells += [cell(row["metrics"][name]) if name in row["metrics"] else _MISSING for name in metrics]
        failed = "**FAILED** " if row.get("is_failure") else ""
        lines.append([*cells, *([failed + row["note"]] if has_notes else [])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(metric: Mapping[str, Any]) -> str:
    """`0.512 s (0.508–0.52)`: a metric's median and quartiles; of a single sample, itself.

    Raises:
        ValueError: an unknown unit.
    """
    unit = metric["unit"]
    values = [metric["median"], *(metric["quartiles"] if len(metric["samples"]) > 1 else [])]
    match unit:
        case "s":
            scale, suffix = (1000, " ms") if metric["median"] < 0.1 else (1, " s")
            texts = [_three_digits(value * scale) for value in values]
        case "nbytes" if metric["median"] >= 10 * _GIB:
            texts, suffix = [f"{value / _GIB:.2f}" for value in values], " GiB"
        case "nbytes":
            texts, suffix = [f"{value / _MIB:.1f}" for value in values], " MiB"
        case "nbytes_per_s":
            texts, suffix = [f"{value / 1e9:.1f}" for value in values], " GB/s"
        case "flops_per_s":
            texts, suffix = [_three_digits(value / 1e12) for value in values], " TFLOPS"
        case "ratio":
            texts, suffix = [f"{value:.3f}" for value in values], " x"
        case "per_s":
            texts, suffix = [f"{value:,.0f}" for value in values], ""
        case "number":
            texts, suffix = [f"{value:.3g}" if value % 1 else f"{value:,.0f}" for value in values], ""
        case _:
            raise ValueError(f"unknown unit {unit!r}")
    spread = f" ({texts[1]}–{texts[2]})" if len(texts) > 1 else ""
    return f"{texts[0]}{suffix}{spread}"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _origin(result: Mapping[str, Any]) -> str:
    hardware, versions = result["hardware"], result["versions"]
    commit = versions["commit"] or "unknown"
    changed = " with uncommitted changes" if versions["has_changes"] else ""
    gpu = f"{hardware['gpu']} ({hardware['gpu_memory_nbytes'] / _GIB:.0f} GiB), " if "gpu" in hardware else ""
    others = "".join(f", {name} {v}" for name, v in versions.items() if name not in _NAMED_VERSIONS)
    return (
        f"{gpu}{hardware['cpu']}, {hardware['num_cores']} cores, {hardware['ram_nbytes'] / _GIB:.0f} GiB of RAM; "
        f"Python {versions['python']}, torch {versions['torch']}{others}, commit {commit[:10]}{changed}; "
        f"{result['date'][:10]}"
    )


def _setting(setting: Mapping[str, Any]) -> str:
    """`num_layers: 24, width: 256` as `24 layers, width 256`."""
    parts = []
    for name, value in setting.items():
        words = name.removeprefix("num_").replace("_", " ")
        parts.append(f"{_plain(value)} {words}" if name.startswith("num_") else f"{words} {_plain(value)}")
    return ", ".join(parts)


def _plain(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _results(path: Path) -> list[Mapping[str, Any]]:
    """A file's results: one suite's, or those of a call (`gpu_calls.py`)."""
    content = json.loads(path.read_text())
    return list(content["suites"].values()) if "suites" in content else [content]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the files named, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE.json")
    args = parser.parse_args(arguments)
    for path in args.results:
        if not path.is_file():
            parser.error(f"there is no file {path}")
        for result in _results(path):
            print(markdown(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
