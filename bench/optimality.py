"""How far plans are from the best: chunkc's predicted step beside a lower bound, and beside other policies' plans.

    python bench/optimality.py [--small] [--only TEXT] [--overlap none|backward] [--out FILE.json]

For each case (a model, a machine, a batch size) the step is planned as `chunkc explain` does, and timed by its
simulator. The same calls, bytes and rates go to

- the bound: a linear program over what is kept, copied and made again, and when (`optimality_bound`), solved by HiGHS;
- the policies of other systems (`policies`), timed by the same simulator, each also with every block's activations
  recomputed.

Nothing runs. Prints a table and saves every figure: by default bench/results/optimality-DATE.json, with `--small` only
where `--out` says. `step_time_s` and `bytes_moved` are null where no plan fits the device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine
from optimality_bound import Call, Gap, Problem, UpdateWork, lower_bound
from policies import POLICIES, phase_plan
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

from chunkc.captured import profile
from chunkc.explaining.explain import budget_of, step_on, training_in
from chunkc.explaining.moments import PlannedRun, StepPlans
from chunkc.explaining.replay import Replay
from chunkc.explaining.updates import Updates
from chunkc.ir.chunks import GRAD, PARAM, Chunk
from chunkc.ir.hardware import Hardware
from chunkc.ir.links import QUEUES, TO_DEVICE, TO_HOME
from chunkc.ir.plan import PhasePlan, Position
from chunkc.ir.program import FORWARD, UPDATE
from chunkc.ir.simulate import STAYING, simulate, step_time
from chunkc.ir.states import MASTER
from chunkc.machines.presets import load_hardware
from chunkc.models import find_model
from chunkc.optim.overlap_mode import NONE
from chunkc.options import parse_options
from chunkc.passes.planning import chunk_items, everything, fixed_nbytes
from chunkc.passes.update_planning import update_positions

RESULTS = Path(__file__).resolve().parent / "results"
RECOMPUTED = " + full checkpointing"


@dataclass(frozen=True)
class Case:
    """A model on a machine. `budget`: as in `torch.compile`'s options."""

    model: str
    hardware: str
    batch_size: int
    budget: str = "auto"
    seq_len: int | None = None


CASES = tuple(
    Case(model, hardware, batch_size)
    for model in ("gpt2-xl", "llama3-8b", "vit-large", "mixtral-8x7b")
    for hardware in ("rtx2060-6g", "rtx3090", "a100-80g", "h200")
    for batch_size in (1, 4, 16)
)
SMALL_CASES = (Case("gpt2-small", "rtx2060-6g", 2, "1.2GiB", 256), Case("bert-base", "rtx2060-6g", 4, "1.2GiB", 128))


@dataclass(frozen=True)
class Planned:
    """A case, planned on paper. `step` is None where nothing fits the budget."""

    replay: Replay
    step: StepPlans | None
    hardware: Hardware
    budget_nbytes: int
    updates: Updates


def plan(case: Case, overlap: str, *, activation_checkpointing: bool) -> Planned:
    """Plan a case as `chunkc explain` does."""
    machine_, spec = load_hardware(case.hardware), find_model(case.model)
    options = parse_options({"memory_budget": case.budget, "codegen": "eager"})
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = spec.build(activation_checkpointing=activation_checkpointing, seq_len=case.seq_len)
        args, kwargs = spec.example(case.batch_size, case.seq_len)
    captured = step_on(machine_, model, args, kwargs, options)
    hardware, updates = training_in(machine_, captured.graphs), Updates(overlap=overlap)
    replay, budget = Replay(captured, options, hardware, updates), budget_of(options, machine_)
    rehearsed = replay.fitting(budget)
    step = replay.planned(rehearsed)
    return Planned(replay, step if rehearsed.budget_nbytes == budget else None, hardware, budget, updates)


def timed(planned: Planned, step: StepPlans, phases: Sequence[PhasePlan]) -> tuple[float, int]:
    """Seconds of a step by the simulator, and the bytes it copies, both ways."""
    costs = {name: cost for run in step.runs for name, cost in run.costs_s().items()}
    nbytes, rate = planned.updates.nbytes(step), planned.hardware.update_bytes_per_s
    costs |= {moment.name: nbytes[moment.name] / rate for moment in (step.update.moments if step.update else ())}
    events = simulate(
        phases,
        costs,
        planned.hardware,
        staying_update_s=nbytes[STAYING] / rate,
        at_home=planned.updates.simulated(step.at_home, step.layout, planned.hardware),
    )
    return step_time(events).total, sum(event.nbytes for event in events if event.stream in QUEUES)


def baselines(planned: Planned) -> Iterator[tuple[str, float]]:
    """Seconds of the step as other policies would move its chunks; those that do not fit are left out.

    The policies get chunkc's own choice of what stays resident, and its tiles for the update.
    """
    step = planned.step
    if step is None:
        return
    lines = {run.phase: _line(run, step) for run in step.runs}
    if step.update is not None:
        lines[UPDATE] = _without(update_positions(step.layout, step.tiles, _beside_update(step)), step.resident)
    fixed = fixed_nbytes(step.layout, step.resident)
    for policy in POLICIES:
        phases = []
        try:
            for phase, line in lines.items():
                capacity = [planned.budget_nbytes - fixed - position.non_model_nbytes for position in line]
                items = chunk_items(step.layout, line)
                phases.append(phase_plan(policy, phase, line, items, capacity))
        except ValueError:
            continue
        yield policy.name, timed(planned, step, phases)[0]


def _beside_update(step: StepPlans) -> int:
    return step.runs[0].captured.caller_nbytes


def _line(run: PlannedRun, step: StepPlans) -> list[Position]:
    """A run's calls as positions, without what stays; named as its plan's moments are."""
    found = profile(run.captured, step.layout)
    positions = found.forward if run.phase == FORWARD else found.backward
    names = [moment.name for moment in run.planned.moments]
    return _without([replace(one, name=name) for one, name in zip(positions, names, strict=True)], step.resident)


def _without(positions: Sequence[Position], resident: frozenset[int]) -> list[Position]:
    def moving(items: frozenset[Chunk]) -> frozenset[Chunk]:
        return frozenset(item for item in items if item.group not in resident)

    return [replace(one, reads=moving(one.reads), writes=moving(one.writes)) for one in positions]


def problem_of(planned: Planned, step: StepPlans, early: bool) -> Problem:
    """What the bound knows of a step in one graph."""
    layout, captured = step.layout, step.runs[0].captured
    positions = profile(captured, layout).passes
    num_forward, num_calls = len(captured.forward.calls), len(positions)
    nbytes = [one.non_model_nbytes + sum(layout.chunk_nbytes_of(item) for item in one.items) for one in positions]
    gaps = list(_chunk_gaps(positions, step, early))
    for gap in _saved_gaps(step.runs):
        gaps.append(gap)
        for at in range(gap.begin, gap.end):
            nbytes[at] -= gap.nbytes
    trained = [layout.groups[index] for index in sorted(layout.groups_of(step.trained))]
    states = tuple(
        sum(group.nbytes(kind) for kind in group.update_kinds if kind not in (PARAM, GRAD)) for group in trained
    )
    staying = replace(step, tiles=(), update=None, resident=everything(layout), at_home=frozenset())
    update_s = planned.updates.nbytes(staying)[STAYING] / planned.hardware.update_bytes_per_s
    rates = {link.name: link.bytes_per_s for link in planned.hardware.links}
    return Problem(
        calls=tuple(Call(one.cost_s, size) for one, size in zip(positions, nbytes)),
        num_forward=num_forward,
        gaps=tuple(gap for gap in gaps if gap.begin != gap.end or gap.begin >= num_calls),
        update=UpdateWork(update_s, states, early),
        capacity_nbytes=planned.budget_nbytes - fixed_nbytes(layout, frozenset()),
        inward=rates[TO_DEVICE],
        outward=rates[TO_HOME],
    )


def _chunk_gaps(positions: Sequence[Position], step: StepPlans, early: bool) -> Iterator[Gap]:
    """Where chunks of parameters and of gradients may be absent."""
    layout, num_calls = step.layout, len(positions)
    trained = layout.groups_of(step.trained)
    uses: dict[Chunk, list[int]] = {}
    for at, position in enumerate(positions):
        for item in position.items:
            uses.setdefault(item, []).append(at)
    for chunk, calls in uses.items():
        name, size = str(chunk), layout.chunk_nbytes_of(chunk)
        is_param, is_trained = chunk.kind == PARAM, chunk.group in trained
        for before, after in pairwise(calls):
            if after > before + 1:
                yield Gap(name, size, before + 1, after, is_dirty=not is_param)
        if is_param and is_trained and not early and MASTER not in layout.groups[chunk.group].update_kinds:
            yield Gap(name, size, calls[-1] + 1, num_calls, is_dirty=False)
            yield Gap(name, size, num_calls, calls[0], is_dirty=True)
        elif is_param:
            yield Gap(name, size, calls[-1] + 1, calls[0], is_dirty=is_trained)
        elif not early:
            yield Gap(name, size, calls[-1] + 1, num_calls + 1, is_dirty=True)


def _saved_gaps(runs: Sequence[PlannedRun]) -> Iterator[Gap]:
    """Where values that the forward saved may be absent, and which call makes each again."""
    captured = runs[0].captured
    forward, backward = captured.forward, captured.backward
    if backward is None:
        return
    storage_of = forward.value_storages()
    given = set(forward.inputs.values()) | forward.held
    given |= {storage_of[value] for value in forward.outputs[: forward.num_user_outputs] if value is not None}
    maker = {storage: at for at, call in reversed(list(enumerate(forward.calls))) for storage in call.output_storages}
    used = {
        storage: max(at for at, call in enumerate(forward.calls) if storage in _touched(call, storage_of))
        for storage in maker
    }
    behind = backward.value_storages()
    uses: dict[str, list[int]] = {}
    for at, call in enumerate(backward.calls):
        for storage in _touched(call, behind):
            uses.setdefault(storage, []).append(at)
    saved = forward.outputs[forward.num_user_outputs :]
    seen = set()
    for value, target in zip(saved, backward.inputs.values()):
        if value is None or (storage := storage_of[value]) in given or storage in seen or target not in uses:
            continue
        seen.add(storage)
        size, calls, offset = forward.storages[storage], uses[target], len(forward.calls)
        if calls[0] + offset > used[storage] + 1:
            yield Gap(storage, size, used[storage] + 1, offset + calls[0], is_dirty=True, rerun=maker[storage])
        for before, after in pairwise(calls):
            if after > before + 1:
                yield Gap(storage, size, offset + before + 1, offset + after, is_dirty=False, rerun=maker[storage])


def _touched(call: Any, storage_of: Mapping[str, str]) -> set[str]:
    return {storage_of[value] for value in (*call.inputs, *call.outputs)}


@dataclass(frozen=True)
class Finding:
    """What was found of a case; seconds and bytes of one step, None where it does not fit."""

    model: str
    hardware: str
    batch_size: int
    memory_budget_nbytes: int
    step_time_s: float | None
    bytes_moved: int | None
    lower_bound_s: float | None
    lower_bound_bytes: float | None
    baselines: Mapping[str, float]

    @property
    def distance(self) -> float | None:
        """How far the step is above the bound, as a part of it."""
        if self.step_time_s is None or not self.lower_bound_s:
            return None
        return self.step_time_s / self.lower_bound_s - 1


def examine(case: Case, overlap: str, *, exact: bool) -> Finding:
    """Plan a case, bound it, and hold other policies against it."""
    plain = plan(case, overlap, activation_checkpointing=False)
    step = plain.step or plain.replay.planned(plain.replay.fitting(plain.budget_nbytes))
    problem = problem_of(plain, step, early=overlap != NONE)
    bound = lower_bound(problem, exact=exact)
    fewest = lower_bound(problem, least_bytes=True, exact=exact)
    others = dict(baselines(plain))
    checkpointed = plan(case, overlap, activation_checkpointing=True)
    if checkpointed.step is not None:
        others["chunkc" + RECOMPUTED] = timed(checkpointed, checkpointed.step, checkpointed.step.phases)[0]
    others |= {name + RECOMPUTED: seconds for name, seconds in baselines(checkpointed)}
    step_s, moved = (None, None) if plain.step is None else timed(plain, plain.step, plain.step.phases)
    return Finding(
        case.model,
        case.hardware,
        case.batch_size,
        plain.budget_nbytes,
        step_s,
        moved,
        bound.seconds,
        fewest.nbytes,
        others,
    )


def show(findings: Sequence[Finding], console: Console) -> None:
    """The findings as a table."""
    table = Table("model", "machine", "batch", "step", "bound", "above it", "best other policy", "its step")
    for found in findings:
        best = min(found.baselines, key=lambda name: found.baselines[name], default=None)
        table.add_row(
            found.model,
            found.hardware,
            str(found.batch_size),
            _seconds(found.step_time_s),
            _seconds(found.lower_bound_s),
            "" if found.distance is None else f"{found.distance:.1%}",
            best or "",
            _seconds(None if best is None else found.baselines[best]),
        )
    console.print(table)


def _seconds(value: float | None) -> str:
    return "does not fit" if value is None else f"{value:.3g} s"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="two small models, under a minute")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose model or machine contains it")
    parser.add_argument("--overlap", default=NONE, help="as the optimizer's argument (default: none)")
    parser.add_argument("--exact", action="store_true", help="whole gaps, not parts: for small instances")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args(arguments)
    cases = [c for c in (SMALL_CASES if options.small else CASES) if options.only in f"{c.model} {c.hardware}"]
    now = datetime.now(UTC)
    out = options.out or (None if options.small else RESULTS / f"optimality-{now:%Y-%m-%d-%H%M}.json")
    result = {"date": now.isoformat(timespec="seconds"), "versions": machine.versions(), "overlap": options.overlap}
    findings: list[Finding] = []
    with Progress(console=Console(stderr=True)) as progress:
        for case in progress.track(cases, description="planning"):
            findings.append(examine(case, options.overlap, exact=options.exact))
            if out is not None:
                rows = [asdict(found) | {"above_bound": found.distance} for found in findings]
                out.write_text(json.dumps({**result, "cases": rows}, indent=1) + "\n")
    show(findings, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
