"""Loading a file as a module, so that no folder of scripts has to be on `sys.path`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock


def load(path: Path) -> ModuleType:
    """Load a file, but add neither the module nor the file's own paths to `sys`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", list(sys.path)):
        spec.loader.exec_module(module)
    return module
