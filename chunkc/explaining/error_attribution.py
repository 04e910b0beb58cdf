"""Attribute an exception in an explanation to a module of the user's model, or to chunkc."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

MODEL_CALL = "<chunkc>"
"""File name of the code that calls the model, so that no file of the user's is named for it."""

_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_PACKAGES = {"site-packages", "dist-packages"}


def is_own_fault(error: BaseException) -> bool:
    """Whether chunkc's own code raised the error, or a library that it called, and not the user's model."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if file == MODEL_CALL:
            return False
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == "chunkc":
            return True
        if not _is_of_a_library(file):
            return False
    return False


def raised_in(error: BaseException) -> str:
    """Return the line that raised the error as ` (planning.py:120)`; "" if it was not raised yet."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def module_that_raises(model: nn.Module, call: Callable[[], Any]) -> str:
    """Return the innermost module that raises when `call` calls the model, as `blocks.3.up (Linear)`; "" if none."""
    names = {module: name for name, module in model.named_modules()}
    running: list[nn.Module] = []
    handles = []
    for module in names:
        handles.append(module.register_forward_pre_hook(lambda module, _: running.append(module)))
        handles.append(module.register_forward_hook(lambda *_: _drop_last(running)))
    try:
        call()
    except Exception:
        if not running:
            return ""
        name, kind = names[running[-1]], type(running[-1]).__name__
        return f"{name} ({kind})" if name else kind
    finally:
        for handle in handles:
            handle.remove()
    return ""


def _drop_last(running: list[nn.Module]) -> None:
    running.pop()


def _is_of_a_library(file: str) -> bool:
    path = Path(file)
    return file.startswith("<frozen") or path.is_relative_to(_LIBRARY) or not _PACKAGES.isdisjoint(path.parts)
