"""Plan the same models at two revisions of the source, and print every plan that differs.

    python bench/replay.py [--base REV] [--small] [--only REGEX] [--jobs N] [--out FILE.json]

The idea is tinygrad's process replay: a refactor is right where nothing that it should leave alone has changed. Each
case is a model, a target and options, in three budgets: the smallest, 1.3 times that, and room for all. `explain`
plans it twice, with the sources of `--base` (a commit; checked out aside) and with those of this checkout as they lie
here; the models, the options and this file are this checkout's for both. Compared are the smallest budget, the
predicted peak, home, residents, the bytes of every moment, every copy and update, the predicted step, the printed plan,
and the kind of an error.

Exit code 0: nothing differs, or each difference is one that `EXPLAINED` names with its reason. Nothing trains.
`--small` takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

BASE = "23f0c80"
"""The commit to compare with where none is named."""

EXPLAINED: dict[str, str] = {
    r"^(autocast_convnet|clip|convnet|convnext|resnet|unet|vit|whisper)\b(?! hardware=)": (
        "convolutions on a CPU are bounded for every instruction set, not modelled after oneDNN"
    ),
    r"activations=auto .*world_size=": 'over ranks "auto" was refused, and is "keep" now',
    r"^(autocast_convnet|convnet|resnet|unet) .*activations=auto .*(room for all|1\.3 times that)": (
        "whole, no buffers are copied first"
    ),
    r"^(palm-8b|mixtral-8x7b) hardware=rtx3090 activations=auto": (
        "homes exceed the preset's host memory, and are planned for a host with room, for offloaded values, too"
    ),
    r": (events|plan): .*'-[^']*\b(offload|reload|leave|arrive)\b": (
        "saved values move by the events of chunks: write_back, wait and evict, then prefetch and wait"
    ),
}
"""Differences from the base that are meant: a regular expression over the lines that this command prints, and why."""

_NUM_DIGITS = 9
"""Of seconds, digits that are compared: sums in another order round differently."""


@dataclass(frozen=True)
class Case:
    """A model and the options of `chunkc.explain`.

    Attributes:
        model: a name of the test zoo's ladder, or of `chunkc.models`.
        hardware: a preset; "cpu" is this machine's kind without its rates.
        optimizer, codegen, activations, overlap, home: as `explain` takes them.
        world_size: ranks that share the model; 1: none.
        batch_size: None: the model's own.
        loss_tile_rows: None: no tiles.
    """

    model: str
    hardware: str = "cpu"
    codegen: str = "eager"
    activations: str = "keep"
    overlap: str = "none"
    home: str = "cpu"
    optimizer: str = "adamw"
    world_size: int = 1
    batch_size: int | None = None
    loss_tile_rows: int | None = None

    @property
    def name(self) -> str:
        """The model, and each option that is not the default."""
        given = (f"{key}={value}" for key, value in asdict(self).items() if value != _DEFAULTS.get(key))
        return " ".join((self.model, *(text for text in given if not text.startswith("model="))))


_DEFAULTS = asdict(Case(""))

_ZOO = (
    "gpt2", "gpt2_dropout", "bert", "bert_dropout", "vit", "llama", "llama_tied", "t5", "mixtral", "convnet",
    "byte_gpt", "short_gpt", "frozen_mlp", "called_twice", "encoder", "graph_breaks", "breaks_in_loop",
    "big_embedding", "resnet", "convnext", "lstm_cells", "unet", "whisper", "clip", "dropout", "checkpointed_gpt",
    "autocast_gpt", "autocast_convnet", "odd_layouts",
)  # fmt: skip
_BUILT_IN = ("gpt-1b", "gpt2-small", "bert-base", "vit-base-32", "llama3-1b", "palm-8b", "mixtral-8x7b")
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"activations": "auto", "overlap": "backward"},
    {"activations": "offload", "home": "disk"},
    {"activations": "rerun", "optimizer": "sgd"},
)
_RANKS = tuple(
    {"hardware": "8xv100-32g", "world_size": world_size, "activations": activations}
    for world_size in (2, 8)
    for activations in ("keep", "auto")
)


def all_cases() -> Iterator[Case]:
    """Yield every case: the zoo on a CPU and for a GPU, the built-in models for a GPU, some with ranks or Inductor."""
    for model in _ZOO:
        yield from (Case(model, **variant) for variant in _VARIANTS)
        yield from (Case(model, hardware="rtx3090", **variant) for variant in _VARIANTS[:2])
    for model in ("gpt2", "llama_tied", "convnet", "mixtral", "frozen_mlp"):
        yield from (Case(model, **ranks) for ranks in _RANKS)
        yield from (Case(model, codegen="inductor", **variant) for variant in _VARIANTS[:2])
    for model in _BUILT_IN:
        yield Case(model, hardware="rtx3090")
        yield Case(model, hardware="rtx3090", activations="auto", overlap="backward", optimizer="adam")
    yield Case("gpt-1b", hardware="8xa100-40g", world_size=8)
    yield Case("gpt-1b", hardware="rtx3090", activations="auto", loss_tile_rows=1024, batch_size=8, home="disk")


def small_cases() -> Iterator[Case]:
    """The few that run in CI: each option once, on models that are traced in a second or two."""
    yield Case("byte_gpt", hardware="rtx3090", activations="auto", overlap="backward")
    yield Case("graph_breaks", activations="offload", home="disk")
    yield Case("called_twice", activations="rerun", optimizer="sgd")
    yield Case("dropout", hardware="8xv100-32g", world_size=2)
    yield Case("frozen_mlp", codegen="inductor")


def plan(case: Case, *, with_room: bool = True) -> dict[str, Any]:
    """Plan a case in each budget. An error is its class, and the smallest budget that it names.

    Args:
        with_room: also plan it where nothing has to move.
    """
    smallest = explain(case, 1)
    found = {"smallest budget": smallest}
    if (least := smallest.get("minimum_budget_nbytes")) is not None:
        found["1.3 times that"] = explain(case, int(1.3 * least))
        if with_room:
            found["room for all"] = explain(case, 1 << 40)
    return found


def explain(case: Case, budget: int) -> dict[str, Any]:
    """Plan a case in one budget, in bytes."""
    import chunkc
    from chunkc.machines.presets import load_hardware  # of either revision

    model, args, kwargs = subject(case)
    hardware = load_hardware(case.hardware)
    if hardware.usable_memory_nbytes is not None:
        budget = min(budget, hardware.usable_memory_nbytes)
    try:
        found = chunkc.explain(
            model, *args, hardware=hardware, memory_budget=budget, codegen=case.codegen, activations=case.activations,
            overlap=case.overlap, home=case.home, optimizer=case.optimizer,
            world_size=case.world_size if case.world_size > 1 else None,
            loss_tile_rows=_whole_loss() if case.loss_tile_rows is None else case.loss_tile_rows, **kwargs,
        )  # fmt: skip
    except chunkc.ChunkcError as error:
        return {"error": type(error).__name__, "minimum_nbytes": getattr(error, "minimum_nbytes", None)}
    return {
        "fits": found.fits,
        "minimum_budget_nbytes": found.minimum_budget_nbytes,
        "predicted_peak_nbytes": found.predicted_peak_nbytes,
        "home_nbytes": found.home_nbytes,
        "chunks": asdict(found.chunks),
        "step_s": float(f"{found.step_time_s.total:.{_NUM_DIGITS}g}"),
        "moments": [f"{moment.phase} {moment.call} {moment.op} {moment.nbytes}" for moment in found.moments],
        "events": [f"{event.stream} {event.kind} {event.name} {event.nbytes}" for event in found.events],
        "plan": found.plan_text.splitlines(),
    }


def _whole_loss() -> str | None:
    """Return the value of `loss_tile_rows` without tiles: "never", or None in revisions without that word."""
    from chunkc.options import Options

    return None if Options().loss_tile_rows is None else "never"


def subject(case: Case) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """A model with the arguments of one call. Of a built-in one nothing is allocated."""
    import torch

    from chunkc.models import find_model

    if case.model in _ZOO:
        import zoo

        return (zoo.LADDER[case.model].build(), (), zoo.LADDER[case.model].batch(0))
    spec = find_model(case.model)
    with torch.device("meta"):
        model = spec.build(activation_checkpointing=False)
        args, kwargs = spec.example(case.batch_size)
    return model, args, kwargs


def child(names: Sequence[str], cases: dict[str, Case], *, with_room: bool) -> None:
    """Print one line of JSON for each case, as it comes."""
    sys.path.insert(0, str(next(ROOT.glob("tests/**/zoo.py")).parent))
    for name in names:
        print(json.dumps({"case": name, "found": plan(cases[name], with_room=with_room)}), flush=True)


def linked(source: Path, folder: Path) -> Path:
    """Link a checkout's `chunkc` into a folder for PYTHONPATH, as its pyproject.toml lays it out."""
    folders = tomllib.loads((source / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    package = folder / "chunkc"
    package.mkdir(parents=True)
    for path in (source / folders["chunkc"]).iterdir():
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    for name, place in folders.items():
        target = folder.joinpath(*name.split("."))
        if name.count(".") == 1 and not target.exists():
            target.symlink_to(source / place)
    return folder


def run(sources: Path, names: Sequence[str], flags: Sequence[str]) -> dict[str, Any]:
    """Plan cases in a process with these sources; results by the case's name.

    Raises:
        SystemExit: it ended with an error.
    """
    environment = os.environ | {"PYTHONPATH": str(sources), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(list(names)), *flags]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"planning with {sources} failed:\n{ended.stderr[-4000:]}")
    return {line["case"]: line["found"] for line in map(json.loads, ended.stdout.splitlines())}


def differences(name: str, base: dict[str, Any], head: dict[str, Any]) -> Iterator[str]:
    """Lines that say what of one case is not what it was."""
    for budget in sorted({*base, *head}):
        old, new = base.get(budget, {}), head.get(budget, {})
        for key in sorted({*old, *new}):
            was, is_now = old.get(key), new.get(key)
            if was == is_now:
                continue
            where = f"{name}, {budget}: {key}"
            if isinstance(was, list) and isinstance(is_now, list):
                changed = [line for line in difflib.unified_diff(was, is_now, n=0, lineterm="") if line[:2] != "@@"][2:]
                yield f"{where}: {len(changed)} lines differ, the first of them {changed[:2]}"
            else:
                yield f"{where}: {was} at the base, {is_now} here"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=BASE, metavar="REV", help=f"the commit to compare with ({BASE})")
    parser.add_argument("--small", action="store_true", help="the few cases that run in CI, in two budgets")
    parser.add_argument("--only", default="", metavar="REGEX", help="only cases with a name that this matches")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes at once (2)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="save what was found at both revisions")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    cases = {case.name: case for case in (small_cases() if options.small else all_cases())}
    if options.child is not None:
        child(json.loads(options.child), cases, with_room=not options.small)
        return 0
    names = [name for name in cases if re.search(options.only, name)]
    flags = ["--small"] * options.small
    with tempfile.TemporaryDirectory() as scratch:
        found = replay(options.base, names, flags, Path(scratch), options.jobs)
    lines = [line for name in names for line in differences(name, found["base"][name], found["head"][name])]
    unexplained = [line for line in lines if not any(re.search(known, line) for known in EXPLAINED)]
    for line in lines:
        reason = next((why for known, why in EXPLAINED.items() if re.search(known, line)), None)
        print(line if reason is None else f"{line} (meant: {reason})")
    print(f"{len(names)} cases, {len(lines)} differences from {options.base}, {len(unexplained)} of them not meant")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(unexplained))


def replay(base: str, names: Sequence[str], flags: Sequence[str], scratch: Path, num_jobs: int) -> dict[str, Any]:
    """Plan at the base and here, as `{"base": {case: found}, "head": {case: found}}`."""
    git = ["git", "-C", str(ROOT)]
    checkout = scratch / "checkout"
    subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(checkout), base], check=True)
    try:
        sources = {"base": linked(checkout, scratch / "base"), "head": linked(ROOT, scratch / "head")}
        parts = [names[k::num_jobs] for k in range(num_jobs) if names[k::num_jobs]]
        with ThreadPoolExecutor(num_jobs) as pool:
            jobs = [(side, pool.submit(run, path, part, flags)) for part in parts for side, path in sources.items()]
            found: dict[str, Any] = {"base": {}, "head": {}}
            for side, job in jobs:
                found[side] |= job.result()
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(checkout)], check=False)
    return found


if __name__ == "__main__":
    sys.exit(main())
