"""Read `chunkc.report` as named numbers for a log; each reading covers the time since the last."""

from __future__ import annotations

from torch import nn

from chunkc.report import Report, report
from chunkc.session.session import sessions_of

PEAK = "chunkc/peak_bytes"


class Scalars:
    """Reader of a model's report, for repeated readings; they are empty before the model's first call."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def read(self, model: nn.Module) -> dict[str, float]:
        """Return the numbers by name.

        `chunkc/peak_bytes` and `chunkc/home_bytes` are of the training so far. `chunkc/to_device_bytes`,
        `chunkc/to_home_bytes`, `chunkc/compute_s` and `chunkc/wait_s` count since the latest reading.
        """
        if len(sessions_of(model.parameters())) != 1:
            return {}
        latest = report(model)
        totals = {
            "chunkc/to_device_bytes": float(latest.traffic_nbytes["to_device"]),
            "chunkc/to_home_bytes": float(latest.traffic_nbytes["to_home"]),
            "chunkc/compute_s": latest.time_s["compute"],
            "chunkc/wait_s": latest.time_s["wait"],
        }
        since = {name: total - self._before.get(name, 0.0) for name, total in totals.items()}
        self._before = totals
        return {PEAK: float(peak_nbytes(latest)), "chunkc/home_bytes": float(latest.home_nbytes), **since}


def peak_nbytes(reported: Report) -> int:
    """Return the peak of the compute tier: as measured, or as predicted if it is not metered."""
    measured = reported.measured_peak_nbytes
    return reported.predicted_peak_nbytes if measured is None else measured
