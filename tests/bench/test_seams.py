"""What would stay in slots between backward, update and forward gains less than updates in the backward do."""

from __future__ import annotations

import pytest
from peers.baselines import plan, timed
from plans import seams


@pytest.mark.slow
def test_updates_in_the_backward_gain_more_than_what_would_be_left() -> None:
    (case,) = seams.SMALL_CASES
    found, planned = seams.examine(case), plan(case, "none", "auto")
    assert planned.step is not None
    step_s, _ = timed(planned, planned.step, planned.step.phases)
    assert found.now_s == pytest.approx(step_s), "put together from its phases the step is what it was"
    assert found.early_s < min(found.backward_to_update_s, found.update_to_forward_s) <= found.now_s
    left = found.now_s - found.backward_to_update_s + found.now_s - found.update_to_forward_s
    assert 0 <= left < found.now_s - found.early_s
