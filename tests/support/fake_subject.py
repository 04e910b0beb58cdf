"""What stands for a subject's process in tests of the suites `budget` and `promise`: it takes a second per step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from measuring.subject_process import Turn
from peers.specs import SubjectSpec


class FakeSubject:
    """Counts calls of `step`; tests say in `begin_step` what goes wrong at which."""

    def __init__(self, spec: SubjectSpec, _cache: Path, *, timeout_s: Any) -> None:
        self.spec, self.exit_note, self.num_calls = spec, "", 0

    def start_in(self, _stack: Any) -> Self:
        return self

    def ended(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin_step(self, num_steps: int) -> Mapping[str, float]:
        """Return the counters of a call."""
        return {}

    def step(self, num_steps: int) -> Turn:
        self.num_calls += 1
        counters = dict(self.begin_step(num_steps))
        return Turn((1.0,) * num_steps, (0.0,) * num_steps, (1.0,) * num_steps, (3.0,) * num_steps, counters)

    def report(self) -> dict[str, Any]:
        return {
            "measured_peak_nbytes": 90,
            "predicted_peak_nbytes": 100,
            "host_nbytes": 7,
            "num_allocator_retries": self.num_calls,
        }
