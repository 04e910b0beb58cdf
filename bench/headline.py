"""Published headline results, as `chunkc explain` sees them: does that model fit that machine, and at what speed?

    python bench/headline.py [--out FILE.json] [--only TEXT]

Nothing runs and nothing is allocated. Each row is one device of the system in question, with the RAM its authors state
(or, where they state none, enough: what is needed is printed). Assumptions, the same for every row: a GPT of the given
number of parameters with sequences of 1024 tokens, 16-bit parameters with fp32 masters and Adam, every block's
activations recomputed, the largest of the batch sizes 16, 8, 4, 2, 1 that fits; rates are the presets' (a datasheet's
peaks times stated efficiencies). Rows on several devices wait for plans over several devices.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch._subclasses.fake_tensor import FakeTensorMode

import chunkc
from chunkc.models import find_model
from chunkc.presets import load_hardware

GIB = 2**30
SEQ_LEN = 1024
BATCH_SIZES = (16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Claim:
    """A published result: which system trained how many billions of parameters, on what.

    `num_layers`, `width`, `num_heads`: the GPT that has as many. `host_nbytes`: stated RAM, None where none is.
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
    Claim("MegaTrain", 120, "h200", 66, 12288, 96, 1536 * GIB),
    Claim("SlideFormer", 123, "rtx4090", 68, 12288, 96, None, "disk"),
    Claim("GreedySnake", 65, "a100-40g", 80, 8192, 64, None, "disk"),
    Claim("GreedySnake", 175, "a100-40g", 96, 12288, 96, None, "disk"),
)


@dataclass(frozen=True)
class Finding:
    """What `explain` says of a claim. Speeds are of one device."""

    claim: Claim
    batch_size: int
    explanation: chunkc.Explanation

    @property
    def tokens_per_s(self) -> float:
        return self.batch_size * SEQ_LEN / self.explanation.step_time_s.total

    @property
    def fits(self) -> bool:
        return self.explanation.fits and self.explanation.host_fits


def explain_claim(claim: Claim) -> Finding:
    """The largest batch size that fits, or the smallest one where none does."""
    hardware = load_hardware(claim.hardware)
    if claim.host_nbytes is not None:
        hardware = replace(hardware, host_memory_nbytes=claim.host_nbytes)
    elif claim.home == "cpu":
        hardware = replace(hardware, host_memory_nbytes=None)
    dtype = torch.bfloat16 if hardware.bf16_flops_per_s else torch.float16
    family = find_model("gpt-18b")
    config = replace(
        family.config, num_layers=claim.num_layers, width=claim.width, num_heads=claim.num_heads, dtype=dtype
    )
    spec = replace(family, config=config)
    for batch_size in BATCH_SIZES:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = spec.build(activation_checkpointing=True, seq_len=SEQ_LEN)
            args, kwargs = spec.example(batch_size, SEQ_LEN)
        found = chunkc.explain(model, *args, hardware=hardware, home=claim.home, name=claim.system, **kwargs)
        if found.fits:
            break
    return Finding(claim, batch_size, found)


def table(findings: Sequence[Finding]) -> str:
    """Findings as a Markdown table."""
    lines = [
        "| system | hardware | published | fits | batch | smallest budget | home | step | tokens/s | bytes/parameter |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for finding in findings:
        claim, found = finding.claim, finding.explanation
        cells = (
            claim.system,
            claim.hardware + (", disk" if claim.home == "disk" else ""),
            f"{claim.billions:g}B",
            "yes" if finding.fits else "no",
            str(finding.batch_size),
            f"{found.minimum_budget_nbytes / GIB:.1f} GiB",
            f"{found.home_nbytes / GIB:.0f} GiB",
            f"{found.step_time_s.total:.1f} s",
            f"{finding.tokens_per_s:.0f}",
            f"{found.home_nbytes / found.num_parameters:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="the explanations' numbers")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose system or hardware contains it")
    options = parser.parse_args(arguments)
    wanted = [c for c in CLAIMS if options.only.lower() in f"{c.system} {c.hardware}".lower()]
    findings = []
    with Progress(console=Console(stderr=True)) as progress:
        for claim in progress.track(wanted, description="explaining"):
            findings.append(explain_claim(claim))
    print(table(findings), end="")
    if options.out is not None:
        left_out = {"moments", "events", "graphs", "plan_text"}
        rows = [
            {k: v for k, v in finding.explanation.to_dict().items() if k not in left_out}
            | {"batch_size": finding.batch_size, "published_billions": finding.claim.billions}
            for finding in findings
        ]
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
