"""What completes a `BudgetError` hides none."""

from __future__ import annotations

import pytest
from torch import nn

from chunkc.explaining import whole_step
from chunkc.ir.errors import BudgetError
from chunkc.options import parse_options
from chunkc.tracing.caller import CalledModule


def test_a_model_on_several_devices_gets_the_error_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose embeddings the CPU looks up: its step cannot be traced, and the budget is what is wrong."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    error = BudgetError(minimum_nbytes=2, budget_nbytes=1, moment="", module="", contents=(), covers="the first graph")
    monkeypatch.setattr(whole_step, "compiled_call", lambda: CalledModule(model, (), {}))
    assert whole_step.completed(error, parse_options({})) is error
