"""The suite `bound`: for each case of `budget`, the least time a step can take, and how much of it chunkc reaches.

One table, a row per case, given out anew with every case so that a run cut short keeps what it had. The machine's
rates are `chunkc.machines.calibrate`'s, measured at the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from measuring.context import Context, Progress
from measuring.metrics import Metric, Row, Section, flat, one
from models.families import sizes
from peers.specs import CHUNKC

from chunkc.ir.links import TO_DEVICE, TO_HOME
from suites import budget, least_step_time
from suites.rates import RatesSpec, measure


def run(context: Context) -> Iterator[Section]:
    """Measure; yields the machine's rates, then a section per case."""
    size = budget.small(context.device) if context.is_small else budget.FULL
    size = replace(size, cases=size.cases[:1] if context.is_small else size.cases, num_rounds=min(2, size.num_rounds))
    cases = [case for case in size.cases if context.wants_case(case.name)]
    progress = Progress(context.show, 1 + len(cases) * (1 + size.num_rounds))
    with context.code_cache() as cache:
        progress("measuring the machine")
        timeout_s = context.reply_timeout(budget.REPLY_TIMEOUT_S)
        hardware = measure(RatesSpec(context.device, context.is_small), cache, timeout_s=timeout_s)
        yield rates_section(hardware)
        for case in cases:
            if context.is_out_of_time:
                return
            outcome = budget.run_case(context, case, size, [CHUNKC], cache, progress)[0]
            counts = sizes(case.model)
            least = least_step_time.lower_bound(
                counts, case.model, case.batch_size, case.budget_nbytes, hardware, context.device
            )
            setting = {"num_parameters": counts.num_parameters, "num_tokens": case.batch_size * case.model.length}
            row = bound_row(case, least, outcome)
            yield Section(f"{case.name}: {least_step_time.FORMULA.split(';')[0]}", setting, [row])


def rates_section(hardware: least_step_time.Hardware) -> Section:
    """Rates of the machine."""
    rates = {
        "matrix products": ("flops_per_s", hardware.flops_per_s),
        "memory": ("nbytes_per_s", hardware.memory_bytes_per_s),
        **{
            link.name.replace("_", " "): ("nbytes_per_s", link.bytes_per_s)
            for link in hardware.links
            if link.name in (TO_DEVICE, TO_HOME)
        },
        "both at once": ("nbytes_per_s", hardware.both_links_bytes_per_s),
        "CPU update": ("nbytes_per_s", hardware.cpu_update_bytes_per_s),
    }
    metrics = {name: one(unit, rate) for name, (unit, rate) in rates.items() if rate is not None}  # type: ignore[arg-type]
    return Section(
        "The machine", {"source": hardware.source, "formula": least_step_time.FORMULA}, [Row({"": "rate"}, metrics)]
    )


def bound_row(case: budget.Case, least: least_step_time.Bound, outcome: budget.Outcome) -> Row:
    """Seconds that each resource needs at least, the measured step, and the part of the bound that it reaches."""
    metrics = {
        "compute": one("s", least.compute_s),
        "links": one("s", least.link_s),
        "CPU update": one("s", least.cpu_update_s),
        "bound": one("s", least.step_s),
    }
    if outcome.turns:
        step = flat("s", [turn.step_s for turn in outcome.turns])
        metrics["step"] = step
        metrics["of bound"] = Metric("ratio", tuple(least.step_s / sample for sample in step.samples))
    labels = {"case": case.name, "limited by": least.limiting}
    return Row(labels, metrics, outcome.note, outcome.is_failure)
