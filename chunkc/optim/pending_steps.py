"""Track steps of which only the device knows yet whether they happened, without waiting for it.

`torch.amp.GradScaler` leaves on the device whether a gradient overflowed. Kernels read it there and change nothing. But
the number of a parameter's next step, and with it its bias corrections, depend on it. So the host counts each step as
if it had happened, and sends a row of scalars for every number the step may turn out to have; the device picks one. The
answers are read back when they have arrived, and the counters corrected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MAX_PENDING = 8
"""Maximum number of pending steps; above it the host waits for the oldest."""


class Answer:
    """A device's number on its way to the host."""

    def __init__(self, number: torch.Tensor) -> None:
        self._host = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True)
        self._host.copy_(number, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(number.device))

    def arrived(self) -> bool:
        return self._event.query()

    def read(self) -> float:
        """Return the number, once it has arrived."""
        self._event.synchronize()
        return float(self._host)


def is_remote(number: torch.Tensor) -> bool:
    """Whether the host would have to wait to see a number."""
    return number.device.type != "cpu"


@dataclass(frozen=True, eq=False)
class PendingStep:
    """A step that may not have happened.

    Attributes:
        found_inf: 0-dim, on the device: not 0 if the step did not happen.
        answer: the same on its way to the host.
        states: the states of the parameters for which the step was counted.
    """

    found_inf: torch.Tensor
    answer: Answer
    states: Mapping[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True)
class PendingHyper:
    """The hyperparameters of a step that follows pending steps.

    Attributes:
        candidates: the hyperparameters by the number of `pending_steps` that did not happen.
    """

    candidates: tuple[Any, ...]
    pending_steps: tuple[PendingStep, ...]

    def after(self, num_skipped: int) -> Any:
        return self.candidates[min(num_skipped, len(self.candidates) - 1)]


class PendingSteps:
    """The pending steps of one optimizer, the oldest first."""

    def __init__(self) -> None:
        self._pending: list[PendingStep] = []

    def add(self, found_inf: torch.Tensor, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Add a step that was just enqueued."""
        self._pending.append(PendingStep(found_inf.clone(), Answer(found_inf), states))

    def resolve(self, *, wait: bool = False) -> None:
        """Correct the counters for all answers that have arrived; with `wait`, for all pending steps."""
        while self._pending and (wait or len(self._pending) > MAX_PENDING or self._pending[0].answer.arrived()):
            pending_step = self._pending.pop(0)
            if pending_step.answer.read() != 0:
                for state in pending_step.states.values():
                    state["step"].sub_(1)

    def hyper(self, parameter: torch.Tensor, step: int, at: Callable[[int], Any]) -> Any:
        """Return a parameter's hyperparameters at a step: `at(step)`, or all candidates if steps before are pending."""
        pending_steps = tuple(pending_step for pending_step in self._pending if parameter in pending_step.states)
        if not pending_steps:
            return at(step)
        return PendingHyper(
            tuple(at(step - num_skipped) for num_skipped in range(len(pending_steps) + 1)), pending_steps
        )


def decided(
    hypers: Sequence[Any],
    make_table: Callable[[list[Any]], torch.Tensor],
    upload: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Make a table of scalars on a device, `[len(hypers), num_scalars]`: the device picks among candidates.

    Args:
        make_table: makes the table of hyperparameters that are not pending, on the CPU.
        upload: copies it to the device.
    """
    depth = max((len(hyper.candidates) for hyper in hypers if isinstance(hyper, PendingHyper)), default=1)
    if depth == 1:
        return upload(make_table(list(hypers)))
    tables = [make_table([h.after(k) if isinstance(h, PendingHyper) else h for h in hypers]) for k in range(depth)]
    candidates = upload(torch.stack(tables))
    counts: dict[tuple[PendingStep, ...], torch.Tensor] = {}
    rows = []
    for hyper in hypers:
        pending_steps = hyper.pending_steps if isinstance(hyper, PendingHyper) else ()
        if pending_steps not in counts:
            flags = [pending_step.found_inf for pending_step in pending_steps] or [candidates.new_zeros(())]
            counts[pending_steps] = (torch.stack(flags) != 0).sum()
        rows.append(counts[pending_steps])
    chosen = torch.stack(rows).view(1, -1, 1).expand(1, -1, candidates.shape[2])
    return candidates.gather(0, chosen).squeeze(0).contiguous()
