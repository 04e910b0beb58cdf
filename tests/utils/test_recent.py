"""What is kept of what was made, and what is forgotten."""

from __future__ import annotations

from chunkc.utils.recent import Recent


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


def test_a_limit_may_be_of_bytes() -> None:
    kept: Recent[int, bytes] = Recent(10, len)
    kept.keep(1, b"1234")
    kept.keep(2, b"12345")
    assert (len(kept), kept.size) == (2, 9)
    kept.find(1)
    kept.keep(3, b"123456")
    assert list(kept.items()) == [(1, b"1234"), (3, b"123456")]
    assert kept.size == 10
    kept.keep(1, b"12")
    assert list(kept.values()) == [b"123456", b"12"]
    assert kept.size == 8


def test_the_latest_is_kept_whatever_its_size() -> None:
    kept: Recent[int, bytes] = Recent(3, len)
    kept.keep(1, b"1")
    assert kept.keep(2, b"12345") == b"12345"
    assert list(kept.items()) == [(2, b"12345")]
    kept.keep(3, b"123")
    assert (list(kept.items()), kept.size) == ([(3, b"123")], 3)
