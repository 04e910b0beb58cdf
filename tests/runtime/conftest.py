"""Fixtures of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from update_cases import Subject

from chunkc.runtime.storage.homes import Home, open_home


@pytest.fixture(params=["cpu", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """Either kind of home."""
    home = open_home("cpu") if request.param == "cpu" else open_home(f"disk:{tmp_path}")
    yield home
    home.close()


@pytest.fixture(params=["cpu", "cuda"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """A store whose updates at home stand still until a gate opens, on either kind of tier."""
    yield (made := Subject(request.param))
    made.gate.opened.set()
    made.settle()
