"""Makes this room's helpers importable under their own names, as the conftest above does with its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for _name in ("cuda_wrappers", "symbolic_runs"):
    if _name not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
        assert _spec is not None
        assert _spec.loader is not None
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])
