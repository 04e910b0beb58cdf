"""Read the measurements of a compiled model's latest step, for its explanation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from chunkc.ir.explanation import COMPUTE, Measured, TimedEvent
from chunkc.ir.hardware import Hardware
from chunkc.ir.program import FORWARD, UPDATE
from chunkc.report import report
from chunkc.session.session import Session, sessions_of


def measured_side(model: nn.Module) -> tuple[dict[str, Any], Hardware | None, Measured | None]:
    """Return the options and the hardware that a model was compiled with, and its measurements, as far as they exist.

    The measured peak is that of all its steps so far; moments and events are those of the latest.
    """
    sessions = sessions_of(model.parameters())
    if len(sessions) != 1:
        return {}, None, None
    session = sessions.pop()
    own = {**session.options.model_dump(), "memory_budget": session.budget_nbytes}
    if not session.records.latest:
        return own, session.hardware, None
    found = report(model)
    moments = tuple(_planned_moments(session))
    peak_nbytes, unplanned_nbytes = found.measured_planned_nbytes, found.unplanned_nbytes
    measured = Measured(peak_nbytes, moments, dict(found.time_s), tuple(_calls(session)), unplanned_nbytes)
    return own, session.hardware, measured


def _planned_moments(session: Session) -> Iterator[tuple[str, int | None]]:
    """Yield the measured bytes of each call of the latest step, without unplanned bytes."""
    for record in session.records.latest.values():
        for name, nbytes in record.measurement.peaks:
            yield name, None if nbytes is None else nbytes - record.measurement.unplanned_nbytes


def _calls(session: Session) -> Iterator[TimedEvent]:
    """Yield the calls of the latest step with their times since its forward began.

    On a GPU there are none: the host runs ahead of the device, and its times say nothing about the device's.
    """
    forward = session.records.latest.get(FORWARD)
    if session.device.type != "cpu" or forward is None or not forward.measurement.spans_s:
        return
    origin_s = forward.measurement.spans_s[0][0]
    for phase, record in session.records.latest.items():
        kind = "update" if phase == UPDATE else "call"
        modules = {moment.name: moment.module for moment in record.plan.moments}
        measurement = record.measurement
        for (name, _), (start_s, end_s) in zip(measurement.peaks, measurement.spans_s, strict=True):
            if start_s >= origin_s:  # an earlier one belongs to the previous step
                module = modules.get(name, "")
                yield TimedEvent(COMPUTE, kind, name, start_s - origin_s, end_s - origin_s, 0, phase, module)
