"""Makes `adam_cases` importable from the tests of this folder, without putting it on `sys.path`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if "adam_cases" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("adam_cases", Path(__file__).with_name("adam_cases.py"))
    assert _spec is not None
    assert _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["adam_cases"] = _module
    _spec.loader.exec_module(_module)
