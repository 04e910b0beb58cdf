"""Fixtures of this room and of `tests/faults`."""

from __future__ import annotations

from store_cases import home  # noqa: F401
from update_cases import subject  # noqa: F401
