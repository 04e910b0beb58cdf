"""The suite `adam`: what its candidates compute, and how rounds become rows."""

import sys
from typing import Any

import pytest
from suites import adam, adam_subject
from suites.adam_spec import (
    ADD,
    BF16,
    BOUNDS,
    CHUNKC,
    CHUNKC_SPLIT,
    COPY,
    FOREACH,
    FP32,
    FUSED,
    FUSED_CASTS,
    AdamSpec,
)

NUM_ELEMENTS = 100_000


@pytest.mark.parametrize(
    ("candidate", "precision"),
    [(FUSED, FP32), (FOREACH, FP32), (FUSED, BF16), (FUSED_CASTS, BF16), (CHUNKC, BF16), (CHUNKC_SPLIT, BF16)],
)
def test_candidates_compute_the_reference(candidate: str, precision: str):
    assert adam_subject._difference(AdamSpec(candidate, precision, NUM_ELEMENTS)) < 1e-6


def test_a_process_obeys_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    replies: list[dict[str, Any]] = []
    with pytest.raises(ValueError, match="jump"):
        adam_subject.serve(AdamSpec(FUSED, FP32, 1000), ["check", "time 3", "jump"], replies.append)
    assert replies[1]["difference"] < 1e-6
    assert len(replies[2]["times_s"]) == 3
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    adam_subject.serve(AdamSpec("bitsandbytes AdamW", FP32, 1000), ["check"], replies.append)
    assert "bitsandbytes" in replies[-1]["unavailable"]


def test_rows_are_held_against_the_best_loop_of_the_same_round():
    slow, fast = {COPY: ([2.0], 100), ADD: ([4.0], 100)}, {COPY: ([2.0], 400), ADD: ([1.0], 400)}
    rounds = [slow | {CHUNKC: ([4.0, 4.0, 9.0], 100)}, fast | {CHUNKC: ([2.0], 400)}]
    row = adam._row(CHUNKC, rounds, 1e-9, "", is_failure=False)
    assert row.metrics["of bound"].samples == (0.5, 0.5)
    assert row.metrics["throughput"].samples == (25.0, 200.0)
    assert not row.is_failure
    assert adam.bound_of({}) is None
    assert adam._row(BOUNDS[0], rounds, None, "", is_failure=False).metrics["of bound"].samples == (1.0, 0.5)


@pytest.mark.parametrize("difference", [1e-3, float("nan")])
def test_a_wrong_subject_is_a_failure(difference: float):
    row = adam._row(CHUNKC, [], difference, "", is_failure=False)
    assert row.is_failure
    assert "differ" in row.note
    assert not adam._row(FUSED, [], difference, "", is_failure=False).is_failure
