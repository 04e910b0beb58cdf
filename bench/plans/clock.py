"""The simulator against the clock, and other policies on chunkc's own runtime: steps on a CPU, over slow links.

    python bench/plans/clock.py [--small] [--overlap auto|none|backward] [--out FILE.json]

RAM computes, and home is in RAM or on a disk; every copy takes as long as its link says, and no less: the thread
that copies sleeps for what is left of it. First the machine is calibrated, with one thread. Links are then so slow that
copying a model's parameters once takes a quarter of a step's arithmetic, or all of it. For each of these, each home and
each budget, the machine is calibrated anew, as its speed changes from minute to minute; and

- a step is planned as `chunkc explain` does, with its defaults, and timed by the simulator; then it trains, and its
  median step is held against that;
- the policies of other systems (`policies`) move the chunks of the same model, by the same runtime under the same
  budget, updated in `step()`, as they do it: with all that forwards save kept, with every block recomputed, with
  PyTorch's `activation_memory_budget`, and with the largest saved values at home (`baselines`).

Losses are the same bits in all of them. Prints a table. Saves every figure where `--out` says, after each case.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from measuring import machine
from models.gpt import GPT, GPTConfig
from peers.baselines import TREATMENTS, Treatment, largest
from peers.policies import POLICIES, Policy, phase_plan
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils.checkpoint import checkpoint

import chunkc
from chunkc.explaining.explain import on_hardware
from chunkc.explaining.offline import capture_offline
from chunkc.explaining.predicted_step import PredictedStep
from chunkc.explaining.updates import Updates
from chunkc.ir.errors import BudgetError
from chunkc.ir.hardware import Hardware, LinkSpec
from chunkc.ir.items import ActivationPlan
from chunkc.ir.layout import PARAM, ChunkLayout
from chunkc.ir.links import FROM_DISK, TO_DEVICE, TO_DISK, TO_HOME
from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK, Event, PhasePlan, Plan
from chunkc.ir.program import UPDATE
from chunkc.ir.simulate import step_time
from chunkc.machines.calibrate import Sizes, calibrate
from chunkc.optim.update_mode import AUTO, NONE, UpdateMode
from chunkc.options import parse_options
from chunkc.passes.planning import timeline as planner
from chunkc.passes.planning import updates as update_planning
from chunkc.passes.planning.residency import chunk_items, moving_only
from chunkc.passes.planning.room import Room
from chunkc.policy import activation_search as activation_plans
from chunkc.policy import plans
from chunkc.policy.captured_step import Captured
from chunkc.runtime.storage.homes import DiskHome, MemoryHome
from chunkc.session import session

LATENCY_S = 2e-4


@dataclass(frozen=True)
class Size:
    """Model, links and budget of a case.

    Attributes:
        ratios: seconds that all parameters take over a link, to those of a step's arithmetic.
        rooms: budgets, as parts of what the plain step takes, above the least.
    """

    model: GPTConfig
    batch_size: int
    num_steps: int
    ratios: tuple[float, ...]
    rooms: tuple[float, ...]
    homes: tuple[str, ...] = ("cpu", "disk")
    policies: tuple[Policy, ...] = POLICIES
    treatments: tuple[Treatment, ...] = TREATMENTS[:4]


FULL = Size(GPTConfig(4, 512, 8, 128), 4, 4, (0.25, 1.0), (0.05, 0.6))
SMALL = Size(GPTConfig(2, 64, 2, 32), 2, 2, (0.5,), (0.05,), ("cpu",), POLICIES[2:4])
QUICKLY = Sizes(256, 1 << 20, 1 << 20, 1 << 16, 1 << 20, repeats=1, share_s=0.05, enough_s=0.001)
"""How `--small` calibrates: nothing is said of its times."""


@dataclass(frozen=True)
class Finding:
    """Seconds of a step of one case: predicted, measured, and by the other policies (None: it does not fit)."""

    home: str
    ratio: float
    budget_nbytes: int
    predicted_s: float
    measured_s: float
    others: dict[str, float | None] = field(default_factory=dict)

    @property
    def distance(self) -> float:
        """Relative error of the prediction."""
        return abs(self.predicted_s / self.measured_s - 1)

    @property
    def best(self) -> tuple[float, str] | None:
        """The quickest other policy that fits, with its seconds."""
        return min(((seconds, name) for name, seconds in self.others.items() if seconds is not None), default=None)


@contextmanager
def slow(hardware: Hardware) -> Iterator[None]:
    """Inside, copies take as long as the hardware's links say, and plans know it."""
    ways = ((MemoryHome, TO_DEVICE, TO_HOME), (DiskHome, FROM_DISK, TO_DISK))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(session, "hardware_of", return_value=hardware))
        for home, inward, outward in ways:
            for name, link in (("read", inward), ("write", outward)):
                stack.enter_context(mock.patch.object(home, name, _paced(getattr(home, name), link, hardware)))
        yield


def _paced(copy: Callable[..., None], link: str, hardware: Hardware) -> Callable[..., None]:
    def paced(home: Any, region: Any, offset_nbytes: int, values: torch.Tensor) -> None:
        until_s = time.perf_counter() + hardware.copy_s(link, values.nbytes)
        copy(home, region, offset_nbytes, values)
        time.sleep(max(0.0, until_s - time.perf_counter()))

    return paced


@contextmanager
def planned_by(policy: Policy, treatment: Treatment, budget_nbytes: int) -> Iterator[None]:
    """Plan by `policy` and `treatment` inside the block.

    The policy moves the chunks, the treatment offloads or recomputes saved values; chunkc still chooses the residents.
    Compilation raises `BudgetError` where that does not fit.
    """

    def plan_phases(phases: Sequence[Any], room: Room, **more: Any) -> Plan:
        own, layout = planner.plan_phases(phases, room, **more), room.layout
        found = []
        for (name, positions), known in zip(phases, own.phases, strict=True):
            line = [moving_only(position, own.resident) for position in positions]
            capacity = list(map(room.free, line))
            saved, links = () if name == UPDATE else more.get("saved", ()), layout.links_of(PARAM)
            try:
                moved = phase_plan(policy, name, line, chunk_items(layout, line, own.resident), capacity, saved, links)
            except ValueError as error:
                raise BudgetError(
                    minimum_nbytes=own.budget_nbytes + 1,
                    budget_nbytes=own.budget_nbytes,
                    moment=f"{name} ({error})",
                    module="",
                    contents=(),
                ) from error
            found.append(_moving_as(moved, known))
        return replace(own, phases=tuple(found), kept=frozenset())

    def largest_away(captured: Captured, activations: str, layout: ChunkLayout) -> ActivationPlan:
        assert activations == "offload"
        return ActivationPlan(offloaded=largest(captured, layout, budget_nbytes))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(plans, "plan_phases", plan_phases))
        stack.enter_context(mock.patch.object(update_planning, "plan_phases", plan_phases))
        stack.enter_context(torch._functorch.config.patch(activation_memory_budget=treatment.saved_part))
        if treatment.offloads:
            stack.enter_context(mock.patch.object(activation_plans, "leanest_activation_plan", largest_away))
        yield


def _moving_as(moved: PhasePlan, known: PhasePlan) -> PhasePlan:
    """A phase of chunkc's with another one's events."""
    pairs = zip(known.moments, moved.moments, strict=True)
    moments = tuple(replace(own, slot_nbytes=other.slot_nbytes) for own, other in pairs)
    return replace(known, stops=tuple(_waiting_once(moved.stops)), moments=moments)


def _waiting_once(stops: Iterable[Sequence[Event]]) -> Iterator[tuple[Event, ...]]:
    """Add one wait for each copy to the events: at the use that it is for, or where its slot is given back."""
    under_way: dict[Any, Event] = {}
    for stop in stops:
        found = []
        for event in stop:
            if event.kind in (WRITE_BACK, EVICT) and event.item in under_way:
                found.append(replace(under_way.pop(event.item), kind=WAIT))
            if event.kind in (PREFETCH, WRITE_BACK):
                under_way[event.item] = event
            if event.kind != WAIT or under_way.pop(event.item, None) is not None:
                found.append(event)
        yield tuple(found)


class Recomputed(torch.nn.Module):
    """A block that keeps its input, and is recomputed in the backward."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return found


def built(size: Size, *, recomputed: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    model = GPT(size.model)
    if recomputed:
        model.blocks = torch.nn.ModuleList(map(Recomputed, model.blocks))
    return model


def batches(size: Size) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = size.batch_size, size.model.length
    while True:
        x = torch.randint(size.model.vocabulary, shape, generator=generator)
        yield x, torch.randint(size.model.vocabulary, shape, generator=generator)


def trained(
    size: Size, options: dict[str, Any], overlap: str, *, recomputed: bool = False
) -> tuple[float, list[float]]:
    """The median of a step's seconds, after two that do not count, and all losses.

    Raises:
        BudgetError: it does not fit.
    """
    torch._dynamo.reset()
    model = built(size, recomputed=recomputed)
    compiled = torch.compile(model, backend="chunkc", options=options)
    optimizer = chunkc.optim.AdamW(model.parameters(), lr=1e-3, update_on="device", overlap=overlap)
    times, losses = [], []
    for (x, y), _ in zip(batches(size), range(size.num_steps + 2), strict=False):
        begun_s = time.perf_counter()
        loss = compiled(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begun_s)
        losses.append(loss.item())
    return median(times[2:]), losses


def on_paper(size: Size, hardware: Hardware, options: dict[str, Any], overlap: str) -> tuple[float, int]:
    """Seconds of the step that is planned, and the least budget."""
    parsed = parse_options(options)
    step = capture_offline(built(size), next(batches(size)), {}, codegen="eager", repeatable=True)
    step = on_hardware(hardware, step, parsed, None)
    predicted = PredictedStep(step, parsed, hardware, Updates(UpdateMode(overlap)))
    assert isinstance(parsed.memory_budget, int)
    dry_run = predicted.fitting(parsed.memory_budget)
    return step_time(predicted.events(predicted.planned(dry_run))).total, predicted.minimum_nbytes(dry_run)


def cases(size: Size, measured: Hardware, overlap: str) -> Iterator[tuple[str, float, Hardware, dict[str, Any]]]:
    """Home, ratio, machine and options."""
    huge: dict[str, Any] = {"memory_budget": 1 << 40, "codegen": "eager"}
    model = built(size)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    arithmetic_s, _ = on_paper(size, measured, huge, NONE)
    _, least_nbytes = on_paper(size, measured, {**huge, "memory_budget": 1}, overlap)
    all_nbytes = 4 * nbytes
    for home in size.homes:
        for ratio in size.ratios:
            links = tuple(
                LinkSpec(name, nbytes / (ratio * arithmetic_s), LATENCY_S)
                for name in (TO_DEVICE, TO_HOME, FROM_DISK, TO_DISK)
            )
            for room in size.rooms:
                options = huge | {"home": home, "memory_budget": least_nbytes + int(room * all_nbytes)}
                yield home, ratio, replace(measured, links=links), options


def find(size: Size, home: str, ratio: float, hardware: Hardware, options: dict[str, Any], overlap: str) -> Finding:
    """Measure a case.

    Raises:
        AssertionError: losses are not the same.
    """
    predicted_s, _ = on_paper(size, hardware, options, overlap)
    with slow(hardware):
        measured_s, losses = trained(size, options, overlap)
        others: dict[str, float | None] = {}
        for treatment, policy in product(size.treatments, size.policies):
            name = f"{policy.name}{treatment}"
            other = options | {"activations": "offload" if treatment.offloads else "keep"}
            try:
                with planned_by(policy, treatment, options["memory_budget"]):
                    others[name], same = trained(size, other, NONE, recomputed=treatment.checkpointing)
            except BudgetError:
                others[name] = None
                continue
            assert same == losses, f"{name}: {same} are not {losses}"
    return Finding(home, ratio, options["memory_budget"], predicted_s, measured_s, others)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one case, within a minute")
    parser.add_argument("--overlap", default=AUTO, help="as the optimizer's argument (default: auto)")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    asked = parser.parse_args(arguments)
    size = SMALL if asked.small else FULL
    torch.set_num_threads(1)
    found: list[Finding] = []
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True)) as progress:

        def measured() -> Hardware:
            return calibrate(device="cpu", directory=folder, sizes=QUICKLY if asked.small else None)

        about = {
            "hardware": machine.hardware(),
            "versions": machine.versions(),
            "overlap": asked.overlap,
            "measured": [],
        }
        todo = list(cases(size, measured(), asked.overlap))
        task = progress.add_task("cases", total=len(todo))
        for home, ratio, hardware, options in todo:
            now = replace(measured(), links=hardware.links)
            about["measured"].append(asdict(now))
            found.append(find(size, home, ratio, now, options, asked.overlap))
            progress.advance(task)
            if asked.out is not None:
                asked.out.write_text(json.dumps({**about, "cases": [asdict(one) for one in found]}, indent=1) + "\n")
    table = Table("home", "copy to compute", "budget", "predicted", "measured", "off by", "best other", "to chunkc")
    for one in found:
        table.add_row(
            one.home,
            f"{one.ratio:g}",
            f"{one.budget_nbytes / 2**20:.1f} MiB",
            f"{one.predicted_s:.3f} s",
            f"{one.measured_s:.3f} s",
            f"{one.distance:.1%}",
            one.best[1] if one.best else "none fits",
            f"{one.best[0] / one.measured_s:.2f}" if one.best else "",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    print(f"predicted and measured are {median(one.distance for one in found):.1%} apart (median)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
