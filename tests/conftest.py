"""Makes the helpers of this folder importable from every test, without putting it on `sys.path`.

A folder of tests on `sys.path` would offer its rooms (`kernels`, `runtime`, ...) as top-level packages.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _load_helper(name: str) -> None:
    """Import `tests/<name>.py` as the top-level module `name`."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


for _helper in (
    "plain_modules",
    "ladder_modules",
    "zoo",
    "harness",
    "scripts",
    "memory_curves",
    "operator_calls",
    "operator_calls_2",
):
    if _helper not in sys.modules:
        _load_helper(_helper)
