"""Makes `synthetic.py` importable from the tests of this folder, as the folder above does for its helpers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if "synthetic" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("synthetic", Path(__file__).with_name("synthetic.py"))
    assert _spec is not None
    assert _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["synthetic"] = _module
    _spec.loader.exec_module(_module)
