"""What a model's runs have measured so far, beside what was predicted of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from chunkc.ir.plan import Plan
from chunkc.runtime.executor import Measurement


@dataclass(frozen=True)
class Record:
    """The latest run of a phase: by which plan, and what was measured."""

    plan: Plan
    measurement: Measurement


@dataclass
class Records:
    """All runs.

    Attributes:
        latest: the latest run of each phase, by phase name.
        peak_nbytes: the largest measured bytes of any run, None where nothing meters the compute tier.
        predicted_peak_nbytes: the largest predicted bytes of any phase that ran.
        compute_s, host_s, num_instructions: of all runs, as of a `Measurement`.
    """

    latest: dict[str, Record] = field(default_factory=dict)
    peak_nbytes: int | None = None
    predicted_peak_nbytes: int = 0
    compute_s: float = 0.0
    host_s: float = 0.0
    num_instructions: int = 0

    def note(self, phase: str, plan: Plan, measurement: Measurement) -> None:
        """Keep what a run measured."""
        self.latest[phase] = Record(plan, measurement)
        predicted = [moment.nbytes for moment in plan.moments if moment.phase == phase]
        self.predicted_peak_nbytes = max([self.predicted_peak_nbytes, *predicted])
        self.compute_s += measurement.compute_s
        self.host_s += measurement.host_s
        self.num_instructions += measurement.num_instructions
        readings = [nbytes for _, nbytes in measurement.peaks if nbytes is not None]
        if readings:
            self.peak_nbytes = max(self.peak_nbytes or 0, measurement.between_nbytes, *readings)
