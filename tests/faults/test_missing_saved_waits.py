"""Each wait for a saved value's copy left out once, where copies come as late as they may: something shows it."""

from __future__ import annotations

from typing import Any

import pytest
from harness import TINY, Arrays, array, compile_case, differences, gradients, refuse, session_of
from late_tiers import LateTier, tier_of_new_sessions
from plain_modules import Stack
from zoo import Case, floats

from chunkc.runtime.execution import saved_instructions

pytestmark = pytest.mark.second_tier

STACK = Case("stack", lambda: Stack(bias=False), lambda seed: {"x": floats(seed, (64, 64))})
"""Values of 16 KiB."""


def test_every_wait_for_a_saved_value_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    with tier_of_new_sessions(LateTier):
        budget = refuse(STACK, memory_budget=TINY, activations="offload").minimum_nbytes
        model, compiled = compile_case(STACK, memory_budget=budget, activations="offload", debug=True, verify=False)

        def step() -> tuple[Any, Arrays]:
            model.zero_grad()
            loss = compiled(**STACK.batch(0))
            loss.backward()
            session_of(model).store.tier.drain()
            return array(loss), gradients(model)

        expected, hold_for, waits = step(), saved_instructions._hold_for, []

        def noted(storage: str, run: Any) -> None:
            waits.append(storage)
            hold_for(storage, run)

        monkeypatch.setattr(saved_instructions, "_hold_for", noted)
        assert not differences(step(), expected)
        num_waits = len(waits)
        assert num_waits >= 8
        assert num_waits == 2 * len(set(waits)), "each storage goes home and comes back"
        for left_out in range(num_waits):
            waits.clear()

            def leaving_one_out(storage: str, run: Any, left_out: int = left_out) -> None:
                waits.append(storage)
                if len(waits) - 1 == left_out:
                    run.saved.under_way.pop(storage)
                else:
                    hold_for(storage, run)

            monkeypatch.setattr(saved_instructions, "_hold_for", leaving_one_out)
            try:
                shows = bool(differences(step(), expected))
            except (LookupError, AttributeError, TypeError):  # nothing has been copied, or there is nothing to copy
                shows = True
            assert shows, f"nothing shows that wait {left_out}, for {waits[left_out]}, is missing"
            monkeypatch.setattr(saved_instructions, "_hold_for", hold_for)
            session_of(model).store.release_slots()
        assert not differences(step(), expected)
