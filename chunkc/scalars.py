"""What `chunkc.report` says of a model, as named numbers for a log; each reading covers the time since the last."""

from __future__ import annotations

from torch import nn

from chunkc.report import Report, report
from chunkc.session.session import sessions_of

PEAK = "chunkc/peak_bytes"


class Scalars:
    """Reads a model's report again and again.

    Before the model's first call there is nothing to read, and a reading is empty.
    """

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def read(self, model: nn.Module) -> dict[str, float]:
        """The numbers, by name.

        `chunkc/peak_bytes` and `chunkc/home_bytes` are of the training so far. `chunkc/to_device_bytes`,
        `chunkc/to_home_bytes`, `chunkc/compute_s` and `chunkc/wait_s` count since the latest reading.
        """
        if len(sessions_of(model.parameters())) != 1:
            return {}
        found = report(model)
        totals = {
            "chunkc/to_device_bytes": float(found.traffic_nbytes["to_device"]),
            "chunkc/to_home_bytes": float(found.traffic_nbytes["to_home"]),
            "chunkc/compute_s": found.time_s["compute"],
            "chunkc/wait_s": found.time_s["wait"],
        }
        since = {name: total - self._before.get(name, 0.0) for name, total in totals.items()}
        self._before = totals
        return {PEAK: float(peak_nbytes(found)), "chunkc/home_bytes": float(found.home_nbytes), **since}


def peak_nbytes(found: Report) -> int:
    """The most that was taken of the compute device: as measured, and where nothing meters it, as predicted."""
    measured = found.measured_peak_nbytes
    return found.predicted_peak_nbytes if measured is None else measured
