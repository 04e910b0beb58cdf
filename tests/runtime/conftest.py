"""Fixtures of this room and of `tests/faults`."""

from __future__ import annotations

from store_cases import home, subject  # noqa: F401
