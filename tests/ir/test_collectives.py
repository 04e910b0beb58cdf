"""Costs of collectives: the formulas, and what holds of them for all numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkc.ir.collectives import collective_s, ring_s, tree_s

NBYTES = st.integers(1, 10**12)
RANKS = st.integers(2, 5000)
RATE = st.floats(1e6, 1e12)
LATENCY = st.floats(0, 1e-2)


def test_a_ring_sends_all_but_one_part() -> None:
    assert ring_s(800, 8, 10.0, 0.5) == pytest.approx(70 + 3.5)


def test_a_tree_takes_two_messages_for_each_level() -> None:
    assert tree_s(800, 8, 10.0, 0.5) == pytest.approx(150 + 3.0)
    assert tree_s(900, 9, 10.0, 0.5) == pytest.approx(170 + 4.0)


def test_small_messages_go_by_trees_and_large_ones_by_rings() -> None:
    assert collective_s(1, 64, 1e9, 1e-5) == tree_s(1, 64, 1e9, 1e-5) < ring_s(1, 64, 1e9, 1e-5)
    assert collective_s(1e9, 64, 1e9, 1e-5) == ring_s(1e9, 64, 1e9, 1e-5) < tree_s(1e9, 64, 1e9, 1e-5)


@given(NBYTES, RATE, LATENCY)
def test_one_rank_has_nobody_to_send_to(nbytes: int, rate: float, latency: float) -> None:
    assert collective_s(nbytes, 1, rate, latency) == 0
    assert collective_s(0, 8, rate, latency) == 0


@given(NBYTES, RANKS, RATE, LATENCY)
def test_nothing_is_faster_than_what_must_be_sent(nbytes: int, ranks: int, rate: float, latency: float) -> None:
    found = collective_s(nbytes, ranks, rate, latency)
    assert found >= (ranks - 1) / ranks * nbytes / rate
    assert found <= ring_s(nbytes, ranks, rate, latency)


@given(NBYTES, NBYTES, RANKS, RATE, LATENCY)
def test_more_bytes_and_more_ranks_take_longer(few: int, more: int, ranks: int, rate: float, latency: float) -> None:
    seconds = collective_s(few, ranks, rate, latency)
    assert seconds <= collective_s(few + more, ranks, rate, latency)
    assert seconds <= collective_s(few, ranks + 1, rate, latency) * (1 + 1e-12)
    assert seconds <= collective_s(few, ranks, rate / 2, latency)
    assert seconds <= collective_s(few, ranks, rate, 2 * latency)
