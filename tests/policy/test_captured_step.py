"""What is asked of a captured graph before any plan."""

from __future__ import annotations

from dataclasses import replace

from verify_cases import LAYOUT, captured_step

from chunkc.policy.captured_step import profile

CAPTURED = captured_step()


def test_the_bytes_of_a_forward_and_of_its_predecessors_outputs_are_its_own() -> None:
    """Input and output take 100 bytes each; the former call's outputs are in the forward's own bytes."""
    assert CAPTURED.external_in_forward(0, 0) == 0
    assert CAPTURED.external_in_forward(100, 100) == 0
    assert CAPTURED.external_in_forward(107, 0) == 7
    assert CAPTURED.external_in_forward(0, 4096) == 3996, "the input is a view of a larger tensor"
    assert CAPTURED.external_in_forward(107, 103) == 10


def test_a_profile_is_made_once_for_a_layout() -> None:
    captured = replace(CAPTURED)
    found = profile(captured, LAYOUT)
    assert profile(captured, LAYOUT) is found
    other = replace(LAYOUT, groups=(*LAYOUT.groups,))
    assert profile(captured, replace(LAYOUT, overhead_nbytes=1)) is found
    assert profile(captured, other) == found
    assert profile(captured, other) is not found
