"""Find the callers of the graph that is being compiled on Python's stack, while Dynamo waits for the backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import dropwhile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from chunkc.torch_private.dynamo import (
    CONVERTS_FRAMES,
    EVALUATES_FRAMES,
    OptimizedModule,
    is_compiled_in_place,
    unwrapped,
)

_TORCH = str(Path(torch.__file__).parent)
_MODULES = str(Path(nn.__file__).parent / "modules")
_CALLS = (nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__)


def called_modules() -> Iterator[nn.Module]:
    """Yield the modules with a call on the stack, the innermost first."""
    for frame in _frames():
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            yield frame.f_locals["self"]


@dataclass(frozen=True)
class CalledModule:
    """A compiled module, as it is called now.

    Attributes:
        num_others: how many other modules of the outermost module that is being called are compiled by themselves.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_others: int = 0


def compiled_call() -> CalledModule | None:
    """Find the outermost call of a compiled module on the stack; None if a function was compiled or a backward runs."""
    found = outermost = None
    for frame in _frames():
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            outermost, args, kwargs = (frame.f_locals[name] for name in ("self", "args", "kwargs"))
            if _is_compiled(outermost):
                found = CalledModule(unwrapped(outermost), args, kwargs)
    if found is None or outermost is None:
        return None
    within = set(found.module.modules())
    others = {unwrapped(module) for module in outermost.modules() if _is_compiled(module)} - within
    return replace(found, num_others=len(others))


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, OptimizedModule) or is_compiled_in_place(module)


def runs_inside_the_compiled_call() -> bool:
    """Whether code that Dynamo runs as it stands calls what it compiles now, inside what the user has compiled."""
    calls: set[int] = set()
    for frame in dropwhile(lambda frame: frame.f_code.co_filename != CONVERTS_FRAMES, _frames()):
        path = frame.f_code.co_filename
        if path == EVALUATES_FRAMES:
            break
        if any(frame.f_code is code for code in _CALLS):  # code that Dynamo has made may have no hash
            calls.add(id(frame.f_locals["self"]))
        elif not path.startswith(_TORCH) or path.startswith(_MODULES):
            return True
    return len(calls) > 1


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
