"""Fixtures of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chunkc.runtime.homes import Home, open_home


@pytest.fixture(params=["cpu", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """Either kind of home."""
    home = open_home("cpu") if request.param == "cpu" else open_home(f"disk:{tmp_path}")
    yield home
    home.close()
