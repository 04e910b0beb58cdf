"""What a compiled model's latest step measured, to be put beside an explanation."""

from __future__ import annotations

from typing import Any

from torch import nn

from chunkc.ir.explanation import Measured
from chunkc.ir.hardware import Hardware
from chunkc.report import report
from chunkc.session import owner


def measured_side(model: nn.Module) -> tuple[dict[str, Any], Hardware | None, Measured | None]:
    """The options and the hardware a model was compiled with, and what was measured; nothing where it was not.

    The measured peak is that of all its steps so far, the moments those of the latest.
    """
    sessions = {hit[0] for parameter in model.parameters() if (hit := owner(parameter)) is not None}
    if len(sessions) != 1:
        return {}, None, None
    session = sessions.pop()
    options = session.options
    own = {
        "memory_budget": session.budget_nbytes,
        "home": options.home,
        "chunk_size": options.chunk_size,
        "codegen": options.codegen,
        "whole_graph": options.whole_graph,
    }
    if not session.records:
        return own, session.hardware, None
    found = report(model)
    moments = tuple((name, nbytes) for name, _, nbytes in found.moments)
    return own, session.hardware, Measured(found.measured_peak_nbytes, moments, dict(found.time_s))
