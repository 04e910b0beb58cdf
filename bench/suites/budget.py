"""The suite `budget`: models under memory budgets, chunkc against other systems that offload.

A section with the machine's rates, then one per model and budget. Every system is a process of its own, held to the
budget (by torch's allocator on a GPU, by a metered one on a CPU). They take turns where all of them fit into the
machine side by side; else each runs its turns before the next begins. Where a system cannot run, its row says why.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from measuring.context import Context, Progress
from measuring.machine import available_ram_nbytes, gpu_nbytes
from measuring.metrics import Metric, Row, Section, flat, largest_difference, one, paired_ratios, setting_of
from measuring.subject_process import (
    NUM_SETTLING_STEPS,
    DoesNotFit,
    OutOfMemory,
    SubjectFailed,
    SubjectProcess,
    TimedOut,
    Turn,
    Unavailable,
    first_line,
    rotated,
)
from models.families import ModelChoice, Sizes, sizes
from peers.specs import CHECKPOINTING, CHUNKC, DEEPSPEED, FSDP2, PLAIN, TORCHAO, SubjectSpec, unavailable

from chunkc.ir.hardware import Hardware
from chunkc.ir.links import TO_DEVICE, TO_HOME
from suites import least_step_time
from suites.least_budget import least_budget_nbytes
from suites.rates import RatesSpec, measure, section_of

SYSTEMS = (CHUNKC, FSDP2, DEEPSPEED, TORCHAO, CHECKPOINTING, PLAIN)
GB = 10**9
MIB = 2**20

HOST_NBYTES_PER_PARAMETER = {CHUNKC: 14, FSDP2: 16, DEEPSPEED: 20, TORCHAO: 16, CHECKPOINTING: 4, PLAIN: 4}
"""Of systems under a budget, in bf16: parameters, gradients, masters and moments in RAM (the last two: while they are
built). A run that would need more RAM than there is would be killed, and others with it: it is not begun."""
HOST_PART = 0.95
SIDE_BY_SIDE_PART = 0.6
LOSS_TOLERANCE = {"float32": 2e-3, "bfloat16": 5e-2}
"""How far losses of equal steps may be apart, by the precision of the arithmetic."""
NUM_WARM_STEPS = 2
REPLY_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Case:
    """A model under a budget."""

    model: ModelChoice
    batch_size: int
    budget_nbytes: int
    is_checkpointed: bool = True
    systems: tuple[str, ...] = SYSTEMS

    @property
    def name(self) -> str:
        """`llama3-8b@6GB`."""
        is_small = self.budget_nbytes < GB
        return f"{self.model.name}@{self.budget_nbytes / (MIB if is_small else GB):g}{'MiB' if is_small else 'GB'}"


@dataclass(frozen=True)
class Size:
    """Cases, and how often they are measured; `num_steps` are those of one turn."""

    cases: tuple[Case, ...]
    num_rounds: int
    num_steps: int
    codegen: str = "inductor"


def cases(name: str, length: int, batch_size: int, *budgets: int) -> tuple[Case, ...]:
    return tuple(Case(ModelChoice(name, length), batch_size, budget * GB) for budget in budgets)


FULL = Size(
    (
        *cases("llama3-8b", 2048, 1, 6),
        *cases("gpt-1b", 1024, 4, 6),
        *cases("llama3-8b", 2048, 2, 12, 24),
        *cases("gpt-1b", 1024, 4, 12, 24, 32),
        *cases("llama3-8b", 2048, 4, 32),
        *cases("gpt-4b", 1024, 4, 6, 12, 24, 32),
        *cases("hf-qwen3-4b", 1024, 2, 6, 12, 24),
        *cases("palm-8b", 2048, 1, 12, 24),
    ),
    num_rounds=4,
    num_steps=3,
)


PEERS = Size(
    (
        *(replace(case, systems=(CHUNKC, FSDP2)) for case in cases("gpt-1b", 1024, 4, 6)),
        *(replace(case, systems=(CHUNKC, PLAIN, CHECKPOINTING)) for case in cases("gpt-1b", 1024, 4, 32)),
    ),
    num_rounds=3,
    num_steps=2,
)
"""What a few minutes of a GPU have room for."""


def small(device: str) -> Size:
    """Cases of small runs: a model with little more than its least budget, and one that fits."""
    tight, roomy = (ModelChoice(name, 64, "float32") for name in ("tiny-3", "hf-tiny"))
    tight_nbytes = limit_for(device, least_budget_nbytes(tight, 2, device, "eager") + 2 * MIB)
    cases = (Case(tight, 2, tight_nbytes), Case(roomy, 2, GB, is_checkpointed=False, systems=(CHUNKC, PLAIN)))
    return Size(cases, num_rounds=1, num_steps=2, codegen="eager")


@dataclass
class Outcome:
    """Outcome of one system in one case."""

    system: str
    turns: list[Turn] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    is_failure: bool = False


def run(context: Context, full: Size = FULL) -> Iterator[Section]:
    """Measure; yields the rates, then each case's section whenever there is news of it."""
    size = small(context.device) if context.is_small else full
    wanted = [case for case in size.cases if context.wants_case(case.name)]
    num_parts = sum(len(_systems(context, case)) for case in wanted) * (1 + size.num_rounds)
    progress = Progress(context.show, 1 + num_parts)
    with context.code_cache() as cache:
        progress("measuring the machine")
        hardware = measure(
            RatesSpec(context.device, context.is_small), cache, timeout_s=context.reply_timeout(REPLY_TIMEOUT_S)
        )
        yield section_of(hardware)
        for case in wanted:
            if context.is_out_of_time:
                return
            for outcomes in states_of_case(context, case, size, _systems(context, case), cache, progress):
                yield _section(context, case, size, outcomes, hardware)


def run_peers(context: Context) -> Iterator[Section]:
    """The suite `peers`: the same, of two cases with few other systems."""
    return run(context, PEERS)


def _systems(context: Context, case: Case) -> list[str]:
    return [name for name in case.systems if context.wants_system(name)]


def states_of_case(
    context: Context, case: Case, size: Size, systems: Sequence[str], cache: Path, progress: Progress
) -> Iterator[list[Outcome]]:
    """Train every system that can run here; yields all outcomes so far whenever a system has trained a turn."""
    outcomes = {system: Outcome(system) for system in systems}
    num_parameters = sizes(case.model).num_parameters
    for system, outcome in outcomes.items():
        outcome.note = unavailable(system) or host_forecast(system, num_parameters)
    names = [system for system in systems if not outcomes[system].note]
    groups = [names] if _fit_side_by_side(context, case, names, num_parameters) else [[name] for name in names]

    def spec(system: str) -> SubjectSpec:
        of = context.device, case.model, case.batch_size, system, case.budget_nbytes, size.codegen
        return spec_of(*of, is_checkpointed=case.is_checkpointed)

    def state() -> list[Outcome]:
        return compared(outcomes.values(), LOSS_TOLERANCE[case.model.dtype], case.budget_nbytes)

    for group in groups:
        with ExitStack() as stack:
            live: dict[str, SubjectProcess] = {}
            timeout_s = context.reply_timeout(REPLY_TIMEOUT_S)
            starting = {name: SubjectProcess(spec(name), cache, timeout_s=timeout_s).start_in(stack) for name in group}
            for name, process in starting.items():
                progress(f"{case.name}: compiling {name}")
                with Guard(outcomes[name], context):
                    process.__enter__()
                    warm_up(process, outcomes[name])
                    live[name] = process
                yield state()
            for round_index in range(size.num_rounds):
                if not live:
                    break
                for name in rotated(list(live), round_index):
                    if context.is_out_of_time and outcomes[name].turns:
                        continue
                    progress(f"{case.name}: training {name}")
                    with Guard(outcomes[name], context):
                        train_turn(live[name], outcomes[name], NUM_SETTLING_STEPS, size.num_steps)
                    yield state()
                live = {name: process for name, process in live.items() if not outcomes[name].note}
        for name, process in starting.items():
            outcomes[name].note = "; ".join(filter(None, (outcomes[name].note, process.exit_note)))
    yield state()


def warm_up(process: SubjectProcess, outcome: Outcome) -> Turn:
    """Train the first steps, which compile, and ask for a report."""
    turn = process.step(NUM_WARM_STEPS)
    outcome.losses += turn.losses
    outcome.report = process.report()
    return turn


def train_turn(process: SubjectProcess, outcome: Outcome, num_settling: int, num_steps: int) -> None:
    """Train a turn, step by step, and ask for a report: what is measured before an error stays in `outcome`.

    Args:
        num_settling: first steps, which are not timed.
    """
    timed: list[Turn] = []
    try:
        for index in range(num_settling + num_steps):
            turn = process.step(1)
            outcome.losses += turn.losses
            timed += [turn] if index >= num_settling else []
    finally:
        if timed:
            outcome.turns.append(Turn.joined(timed))
    outcome.report = process.report()


def compared(outcomes: Iterable[Outcome], tolerance: float, budget_nbytes: int) -> list[Outcome]:
    """Copy outcomes, with notes and failures that say how losses and bytes compare."""
    copies = {outcome.system: replace(outcome) for outcome in outcomes}
    compare_losses(list(copies.values()), tolerance)
    check_promise(copies, budget_nbytes)
    return list(copies.values())


class Guard:
    """Turn an error inside into the outcome's note; of chunkc, a failure, unless budget or time is too small."""

    def __init__(self, outcome: Outcome, context: Context) -> None:
        self._outcome, self._context = outcome, context

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, NO_ANSWER):
            return False
        print(f"{self._outcome.system}: {error}", file=sys.stderr)  # all of it; a table has room for a line
        self._outcome.note, is_failure = judged(error, self._outcome.system, self._context)
        self._outcome.is_failure |= is_failure
        return True


NO_ANSWER = (DoesNotFit, OutOfMemory, Unavailable, SubjectFailed)
"""What a subject raises that does not train."""


def judged(error: BaseException, system: str, context: Context) -> tuple[str, bool]:
    """Note for one of `NO_ANSWER`, and whether it is chunkc's failure: not if budget or time is too small."""
    if isinstance(error, TimedOut) and context.is_out_of_time:
        return "the time was up", False
    prefix = {OutOfMemory: "out of memory: ", SubjectFailed: "failed: "}.get(type(error), "")
    return prefix + first_line(error), system == CHUNKC and not isinstance(error, DoesNotFit | Unavailable)


def compare_losses(outcomes: Sequence[Outcome], tolerance: float) -> None:
    """Note losses that differ from chunkc's; if all others do, the failure is chunkc's."""
    subject = next((outcome for outcome in outcomes if outcome.system == CHUNKC and outcome.losses), None)
    if subject is None:
        return
    others = [outcome for outcome in outcomes if outcome is not subject and outcome.losses]
    differences = [(outcome, largest_difference(outcome.losses, subject.losses)) for outcome in others]
    strange = [(outcome, difference) for outcome, difference in differences if not difference <= tolerance]
    for outcome, difference in strange:
        outcome.note = outcome.note or f"losses differ by {difference:.2g} from chunkc's: not the same training"
    if others and len(strange) == len(others):
        subject.note, subject.is_failure = "losses differ from those of every other system", True


def check_promise(outcomes: Mapping[str, Outcome], budget_nbytes: int) -> None:
    """A budget is a promise: chunkc's measured bytes above it are a failure."""
    subject = outcomes.get(CHUNKC)
    peak_nbytes = subject.report.get("measured_peak_nbytes") if subject else None
    if subject is not None and peak_nbytes is not None and peak_nbytes > budget_nbytes:
        subject.note, subject.is_failure = f"took {peak_nbytes - budget_nbytes:,} bytes more than its budget", True


def spec_of(
    device: str,
    model: ModelChoice,
    batch_size: int,
    system: str,
    limit_nbytes: int,
    codegen: str,
    *,
    is_checkpointed: bool = True,
    **options: Any,
) -> SubjectSpec:
    """A system that is held to `limit_nbytes`; `options` are further ones of chunkc's."""
    is_held = device == "cuda" or system not in (FSDP2, DEEPSPEED)
    own = {"memory_budget": plan_budget(device, limit_nbytes), "codegen": codegen, "activations": "keep", **options}
    return SubjectSpec(
        model,
        batch_size,
        system,
        own if system == CHUNKC else None,
        device=device,
        is_metered=device == "cpu",
        is_placed=system == CHUNKC,
        # On a CPU these offload into the very memory that they compute in.
        limit_nbytes=limit_nbytes if is_held else None,
        is_checkpointed=is_checkpointed,
        codegen=codegen,
    )


def plan_budget(device: str, limit_nbytes: int) -> int:
    """Options of chunkc where torch's allocator is held to `limit_nbytes`.

    On a GPU that limit is for what the allocator takes of the driver: whole pages, which blocks fill only in part.
    """
    return limit_nbytes - (max(64 * MIB, limit_nbytes // 32) if device == "cuda" else 0)


def limit_for(device: str, budget_nbytes: int) -> int:
    """A limit of which `plan_budget` makes `budget_nbytes`, or a little more."""
    return budget_nbytes + (max(64 * MIB, budget_nbytes // 31 + 1) if device == "cuda" else 0)


def host_forecast(system: str, num_parameters: int) -> str:
    """Why a run would not fit into RAM; "" if it would, as far as can be told."""
    needed = HOST_NBYTES_PER_PARAMETER[system] * num_parameters
    available = available_ram_nbytes()
    if needed <= HOST_PART * available:
        return ""
    return f"needs about {needed / 2**30:.0f} GiB of RAM, {available / 2**30:.0f} are available"


def _fit_side_by_side(context: Context, case: Case, names: Sequence[str], num_parameters: int) -> bool:
    host = sum(HOST_NBYTES_PER_PARAMETER[name] for name in names) * num_parameters
    device = len(names) * case.budget_nbytes
    total = gpu_nbytes() if context.device == "cuda" else None
    return host <= SIDE_BY_SIDE_PART * available_ram_nbytes() and (total is None or device <= HOST_PART * total)


def _section(context: Context, case: Case, size: Size, outcomes: Sequence[Outcome], hardware: Hardware) -> Section:
    counts = sizes(case.model)
    bound = least_step_time.lower_bound(
        counts, case.model, case.batch_size, case.budget_nbytes, hardware, context.device
    )
    subject = next((outcome for outcome in outcomes if outcome.system == CHUNKC), None)
    rows = [
        Row(
            {"system": o.system}, metrics_of(o, subject, case, counts, bound, hardware), _note(context, o), o.is_failure
        )
        for o in outcomes
    ]
    setting = setting_of(
        case.model,
        case.batch_size,
        num_parameters=counts.num_parameters,
        budget_nbytes=case.budget_nbytes,
        activation_checkpointing="of all that offload" if case.is_checkpointed else "none",
        num_rounds=size.num_rounds,
        num_steps_per_round=size.num_steps,
        FLOPs_per_step=f"{counts.flops_per_step(case.batch_size, case.model.length):.4g}",
        bound=f"{least_step_time.FORMULA}; limited by {bound.limiting}",
    )
    return Section(case.name, setting, rows)


def _note(context: Context, outcome: Outcome) -> str:
    if not outcome.note and context.device == "cpu" and outcome.system in (FSDP2, DEEPSPEED):
        return "not held to the budget: on a CPU it offloads into the memory it computes in"
    return outcome.note


def metrics_of(
    outcome: Outcome,
    subject: Outcome | None,
    case: Case,
    counts: Sizes,
    bound: least_step_time.Bound,
    hardware: Hardware,
) -> dict[str, Metric]:
    """A system's figures; chunkc's also against its prediction and the bound."""
    metrics: dict[str, Metric] = {}
    if outcome.turns:
        if subject is not None and len(subject.turns) == len(outcome.turns) and outcome is not subject:
            mine, its = ([turn.step_s for turn in o.turns] for o in (outcome, subject))
            metrics["time to chunkc's"] = paired_ratios(mine, its)
        if outcome.system == CHUNKC:
            metrics["bound"] = one("s", bound.step_s)
            samples = [sample for turn in outcome.turns for sample in turn.step_s]
            metrics["of bound"] = Metric("ratio", tuple(bound.step_s / sample for sample in samples))
            metrics |= _link_metrics(outcome.turns, hardware)
            metrics |= _host_metrics(outcome.turns, hardware.kind == "cuda")
    if subject is not None and outcome is not subject and outcome.losses and subject.losses:
        metrics["loss difference"] = one("number", largest_difference(outcome.losses, subject.losses))
    return own_metrics(outcome, case, counts) | metrics


def own_metrics(outcome: Outcome, case: Case, counts: Sizes) -> dict[str, Metric]:
    """A system's speed and memory, compared with nothing but its own prediction."""
    metrics: dict[str, Metric] = {}
    if outcome.turns:
        step = flat("s", [turn.step_s for turn in outcome.turns])
        flops = counts.flops_per_step(case.batch_size, case.model.length)
        tokens = case.batch_size * case.model.length
        metrics["step"] = step
        metrics["tokens/s"] = Metric("per_s", tuple(tokens / sample for sample in step.samples))
        metrics["arithmetic"] = Metric("flops_per_s", tuple(flops / sample for sample in step.samples))
    for name, key in (
        ("predicted peak", "predicted_peak_nbytes"),
        ("measured peak", "measured_peak_nbytes"),
        ("reserved peak", "reserved_peak_nbytes"),
        ("driver's count", "driver_nbytes"),
        ("home", "home_nbytes"),
        ("RAM", "host_nbytes"),
    ):
        if outcome.report.get(key) is not None:
            metrics[name] = one("nbytes", outcome.report[key])
    if "driver's count" in metrics and "reserved peak" in metrics:
        beyond = outcome.report["driver_nbytes"] - outcome.report["reserved_peak_nbytes"]
        metrics["context and libraries"] = one("nbytes", beyond)
    if "predicted peak" in metrics and "measured peak" in metrics:
        ratio = outcome.report["measured_peak_nbytes"] / outcome.report["predicted_peak_nbytes"]
        metrics["measured to predicted"] = one("ratio", ratio)
    return metrics


def _link_metrics(turns: Sequence[Turn], hardware: Hardware) -> dict[str, Metric]:
    """Per step: bytes each way, and the part of the step that the links, at their measured rates, were busy."""
    pairs = [(turn.counters["to_device_nbytes"], turn.counters["to_home_nbytes"]) for turn in turns]
    means_s = [sum(turn.step_s) / len(turn.step_s) for turn in turns]
    use = [
        hardware.link_seconds(dict(zip((TO_DEVICE, TO_HOME), pair))) / mean_s
        for pair, mean_s in zip(pairs, means_s, strict=True)
    ]
    return {
        "moved in": Metric("nbytes", tuple(pair[0] for pair in pairs)),
        "moved out": Metric("nbytes", tuple(pair[1] for pair in pairs)),
        "link use": Metric("ratio", tuple(use)),
    }


def _host_metrics(turns: Sequence[Turn], is_ahead: bool) -> dict[str, Metric]:
    """Host seconds of chunkc's own instructions: per instruction, and as a part of the step.

    Where the host runs ahead of the device, to wait for a copy is such an instruction too.
    """
    counters = [turn.counters for turn in turns]
    pairs = [(c["host_s"] + (c["wait_s"] if is_ahead else 0.0), c["num_instructions"]) for c in counters]
    means_s = [sum(turn.step_s) / len(turn.step_s) for turn in turns]
    return {
        "host per instruction": Metric("s", tuple(host_s / max(1, number) for host_s, number in pairs)),
        "host of step": Metric("ratio", tuple(host_s / mean_s for (host_s, _), mean_s in zip(pairs, means_s))),
    }
