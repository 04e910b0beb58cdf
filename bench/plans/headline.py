"""Published headline results, as `chunkc explain` sees them: does that model fit that machine, and at what speed?

    python bench/plans/headline.py [--out FILE.json] [--only TEXT]

Prints a Markdown table and saves what was found to bench/results/headline-DATE.json, rewritten after every row. With
`--out` of an earlier run, rows that are in it already are taken from there. About two minutes a row on one core.

Nothing runs and nothing is allocated. Each row has the devices of the system in question, and hosts with the RAM its
authors state (or, where they state none, enough: what is needed is printed). Assumptions, the same for every row: a
GPT of the given number of parameters with sequences of 1024 tokens, 16-bit parameters with fp32 masters and Adam,
losses in tiles of a sequence, the largest of the batch sizes 1, 2, 4, 8, 16 of a device that fits, with its home if any
does; rates are the presets' (a datasheet's peaks times stated efficiencies). One device has `activations="auto"` and
`overlap="backward"`, in fp16 with `undoable=True` for the `GradScaler`, which skips no step here. Several devices share
the model as `chunkc.distribute` cuts it, in stage 3 of ZeRO, with every block's activations recomputed. Budgets are
those of one device, homes those of all ranks of a host.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring import machine

import chunkc
from chunkc.machines.presets import load_hardware
from chunkc.models import find_model
from chunkc.optim.update_mode import BACKWARD

GIB = 2**30
SEQ_LEN = 1024
BATCH_SIZES = (1, 2, 4, 8, 16)
RESULTS = Path(__file__).resolve().parents[1] / "results"


_ASSUMPTIONS = " ".join((__doc__ or "").partition("Nothing runs")[2].split()).removeprefix("and nothing is allocated. ")


@dataclass(frozen=True)
class Claim:
    """A published result: which system trained how many billions of parameters, on what.

    `num_layers`, `width`, `num_heads`: the GPT that has as many. `host_nbytes`: stated RAM of a host; None: none is.
    """

    system: str
    billions: float
    hardware: str
    num_layers: int
    width: int
    num_heads: int
    host_nbytes: int | None = None
    home: str = "cpu"


CLAIMS = (
    Claim("Colossal-AI Gemini", 1.5, "rtx2060-6g", 48, 1600, 25),
    Claim("Colossal-AI Gemini", 18, "rtx3090", 90, 4096, 16),
    Claim("Colossal-AI Gemini", 24, "v100-32g", 30, 8192, 16),
    Claim("ZeRO-Offload", 13, "v100-32g", 64, 4096, 16),
    Claim("ZeRO-3 offload", 40, "v100-32g", 50, 8192, 16, 1536 * GIB),
    Claim("PatrickStar, one A100", 50, "a100-40g", 62, 8192, 16, 1024 * GIB),
    Claim("PatrickStar", 18, "8xv100-32g", 90, 4096, 16, 240 * GIB),
    Claim("PatrickStar", 68, "8xa100-40g", 66, 9216, 16, 1024 * GIB),
    Claim("PatrickStar", 175, "32xa100", 96, 12288, 96, 1024 * GIB),
    Claim("MegaTrain", 120, "h200", 66, 12288, 96, 1536 * GIB),
    Claim("SlideFormer", 123, "rtx4090", 68, 12288, 96, None, "disk"),
    Claim("GreedySnake", 65, "a100-40g", 80, 8192, 64, None, "disk"),
    Claim("GreedySnake", 175, "a100-40g", 96, 12288, 96, None, "disk"),
)


@dataclass(frozen=True)
class Finding:
    """Explanation of a claim. Speeds are of all devices together, homes and traffic of one rank."""

    claim: Claim
    batch_size: int
    explanation: chunkc.Explanation

    def to_row(self) -> dict[str, Any]:
        """The claim, and what a table needs of the finding, as plain values."""
        found, ranks, total_s = self.explanation, self.explanation.ranks, self.explanation.step_time_s.total
        return {
            "claim": asdict(self.claim),
            "num_parameters": found.num_parameters,
            "batch_size": self.batch_size,
            "fits": found.fits and found.host_fits,
            "memory_budget_nbytes": found.memory_budget_nbytes,
            "minimum_budget_nbytes": found.minimum_budget_nbytes,
            "predicted_peak_nbytes": found.predicted_peak_nbytes,
            "home_nbytes": found.home_nbytes,
            "disk_nbytes": found.disk_nbytes,
            "traffic_nbytes": asdict(found.traffic_nbytes),
            "step_time_s": asdict(found.step_time_s),
            "num_ranks": 1 if ranks is None else ranks.num_ranks,
            "ranks_per_host": 1 if ranks is None else ranks.ranks_per_host,
            "link_nbytes": {} if ranks is None else dict(ranks.link_nbytes),
            "tokens_per_s": (1 if ranks is None else ranks.num_ranks) * self.batch_size * SEQ_LEN / total_s,
            "notes": list(found.notes),
        }


def explain_claim(claim: Claim, show: Callable[[str], None]) -> Finding:
    """The largest batch size that fits device and host, else the device; the smallest one where none does."""
    hardware = replace(load_hardware(claim.hardware), host_memory_nbytes=claim.host_nbytes)
    dtype = torch.bfloat16 if hardware.bf16_flops_per_s else torch.float16
    family = find_model("gpt-18b")
    config = replace(
        family.config, num_layers=claim.num_layers, width=claim.width, num_heads=claim.num_heads, dtype=dtype
    )
    spec = replace(family, config=config)
    is_alone = hardware.num_devices == 1
    options = {"hardware": hardware, "home": claim.home, "name": claim.system, "loss_tile_rows": SEQ_LEN}
    if is_alone:
        options |= {"activations": "auto", "overlap": BACKWARD, "undoable": dtype == torch.float16}

    @functools.cache
    def explained(batch_size: int) -> chunkc.Explanation:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = spec.build(activation_checkpointing=not is_alone, seq_len=SEQ_LEN)
            args, kwargs = spec.example(batch_size, SEQ_LEN)
        show(f"{claim.system}, {claim.billions:g}B on {claim.hardware}, batch size {batch_size}")
        return chunkc.explain(model, *args, **options, **kwargs)

    def largest(fits: Callable[[chunkc.Explanation], bool]) -> int:
        """Count the batch sizes that fit: all before the first that does not."""
        return bisect.bisect(BATCH_SIZES, False, key=lambda batch_size: not fits(explained(batch_size)))

    num_fitting = largest(lambda found: found.fits and found.host_fits) or largest(lambda found: found.fits)
    batch_size = BATCH_SIZES[max(num_fitting - 1, 0)]
    return Finding(claim, batch_size, explained(batch_size))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table."""
    lines = [
        "| system | hardware | published | fits | batch | smallest budget | home | of it in RAM | step | tokens/s "
        "| bytes/parameter |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        claim, on_host = row["claim"], row.get("ranks_per_host", 1)
        home_nbytes, disk_nbytes = on_host * row["home_nbytes"], on_host * row["disk_nbytes"]
        cells = (
            claim["system"],
            claim["hardware"] + (", disk" if claim["home"] == "disk" else ""),
            f"{claim['billions']:g}B",
            "yes" if row["fits"] else "no",
            str(row["batch_size"]),
            f"{row['minimum_budget_nbytes'] / GIB:.1f} GiB",
            f"{home_nbytes / GIB:.0f} GiB",
            f"{(home_nbytes - disk_nbytes) / GIB:.0f} GiB",
            f"{row['step_time_s']['total']:.1f} s",
            f"{row['tokens_per_s']:.0f}",
            f"{row.get('num_ranks', 1) * row['home_nbytes'] / row['num_parameters']:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="default: bench/results/headline-DATE.json")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows with this text in system or hardware")
    options = parser.parse_args(arguments)
    now = datetime.now(UTC)
    out = options.out or RESULTS / f"headline-{now:%Y-%m-%d-%H%M}.json"
    known = json.loads(out.read_text())["rows"] if out.exists() else []
    rows = {json.dumps(row["claim"]): row for row in known}
    result = {"date": now.isoformat(timespec="seconds"), "versions": machine.versions(), "assumptions": _ASSUMPTIONS}
    wanted = [c for c in CLAIMS if options.only.lower() in f"{c.system} {c.hardware}".lower()]
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(wanted))
        for claim in wanted:
            key = json.dumps(asdict(claim))
            if key not in rows:
                finding = explain_claim(claim, lambda what: progress.update(task, description=what))
                rows[key] = finding.to_row()
                in_order = [rows[k] for c in CLAIMS if (k := json.dumps(asdict(c))) in rows]
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps({**result, "rows": in_order}, indent=1) + "\n")
            progress.advance(task)
    print(table([rows[k] for c in CLAIMS if (k := json.dumps(asdict(c))) in rows]), end="")
    print(f"\n{out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
