"""Keep what a model's runs have measured so far, and what was predicted of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from chunkc.ir.plan import Plan
from chunkc.ir.program import BACKWARD, FORWARD, UPDATE
from chunkc.runtime.execution.run import Measurement
from chunkc.runtime.store.slots import Traffic


@dataclass(frozen=True)
class Record:
    """The latest run of a phase: by which plan, and what was measured."""

    plan: Plan
    measurement: Measurement


@dataclass
class Records:
    """The measurements of all runs.

    Attributes:
        latest: the latest run of each phase, by phase name.
        peak_nbytes: the largest measured bytes of any run, None where nothing meters the compute tier.
        unplanned_nbytes: what of them no plan counts (see `Measurement`).
        planned_peak_nbytes: the largest measured bytes of any run without what no plan counts.
        with_home_nbytes: the same with what was in use at home at that time.
        predicted_peak_nbytes: the largest predicted bytes of any phase that ran.
        compute_s, host_s, num_instructions: of all runs, as of a `Measurement`.
        latest_host_s: seconds of the host inside the latest step's `forward` calls, `backward` calls, and `update`.
    """

    latest: dict[str, Record] = field(default_factory=dict)
    peak_nbytes: int | None = None
    unplanned_nbytes: int = 0
    planned_peak_nbytes: int | None = None
    with_home_nbytes: int | None = None
    predicted_peak_nbytes: int = 0
    compute_s: float = 0.0
    host_s: float = 0.0
    num_instructions: int = 0
    latest_host_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str, traffic: Traffic) -> Iterator[None]:
        """Time all that the host does in a call of a phase, waits for copies apart. One that fails does not count.

        A forward that comes after a backward begins another step; of the optimizer, the latest update counts.
        """
        begun_s, waited_s = time.perf_counter(), traffic.wait_s
        yield
        taken_s = time.perf_counter() - begun_s - (traffic.wait_s - waited_s)
        if phase == FORWARD and BACKWARD in self.latest_host_s:
            self.latest_host_s.pop(FORWARD, None)
            self.latest_host_s.pop(BACKWARD)
        former_s = 0.0 if phase == UPDATE else self.latest_host_s.get(phase, 0.0)
        self.latest_host_s[phase] = former_s + taken_s

    def note(self, phase: str, plan: Plan, measurement: Measurement) -> None:
        """Keep what a run measured."""
        self.latest[phase] = Record(plan, measurement)
        predicted = [moment.nbytes for moment in plan.moments if moment.phase == phase]
        self.predicted_peak_nbytes = max([self.predicted_peak_nbytes, *predicted])
        self.compute_s += measurement.compute_s
        self.host_s += measurement.host_s
        self.num_instructions += measurement.num_instructions
        peak_nbytes, unplanned_nbytes = measurement.peak_nbytes, measurement.unplanned_nbytes
        if peak_nbytes is not None:
            if peak_nbytes > (self.peak_nbytes or 0):
                self.peak_nbytes, self.unplanned_nbytes = peak_nbytes, unplanned_nbytes
            self.planned_peak_nbytes = max(self.planned_peak_nbytes or 0, peak_nbytes - unplanned_nbytes)
            self.with_home_nbytes = max(self.with_home_nbytes or 0, measurement.with_home_nbytes)
