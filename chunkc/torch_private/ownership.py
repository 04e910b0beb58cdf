"""Tell code of PyTorch and chunkc from code of others, which may have changed since another process ran it."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch

_BUILT_IN = ("torch", "math", "_operator", "builtins")
"""Modules of functions without Python code."""

_HERE = Path(__file__).resolve()
_FOLDERS = (Path(torch.__file__).resolve().parent, _HERE.parents[1], _HERE.parents[2] / "passes")


def is_own(function: Any) -> bool:
    """Whether a function is PyTorch's or chunkc's, by the file of its code: a name can be another function's."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        return _is_own_file(code.co_filename)
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0] in _BUILT_IN


@cache
def _is_own_file(name: str) -> bool:
    return any(Path(name).resolve().is_relative_to(folder) for folder in _FOLDERS)
