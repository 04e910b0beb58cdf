"""What is kept of what was made, and what is forgotten."""

from __future__ import annotations

from chunkc.recent import Recent


def test_what_was_not_used_for_longest_goes() -> None:
    kept: Recent[int, str] = Recent(2)
    kept.keep(1, "one")
    kept.keep(2, "two")
    assert kept.find(1) == "one"
    assert kept.keep(3, "three") == "three"
    assert kept.find(2) is None
    assert list(kept.items()) == [(1, "one"), (3, "three")]


def test_an_entry_may_be_replaced() -> None:
    kept: Recent[int, str] = Recent(2)
    for key, value in ((1, "a"), (2, "b"), (1, "c"), (3, "d")):
        kept.keep(key, value)
    assert list(kept.items()) == [(1, "c"), (3, "d")]
