"""Dynamo's recompile limit, as an error: beyond it a function would run eagerly, without a plan and outside the budget.

Dynamo compiles one function so many times, for all models and options together, and then runs it as it is with a
warning of its own. No backend is asked. But Dynamo asks registered hooks for a text when it is about to compile; this
one looks whether the limit is reached for a function that chunkc was to compile, and raises.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch._dynamo import register_hook_for_recompile_user_context
from torch._dynamo.cache_size import exceeds_recompile_limit

from chunkc.ir.errors import UnsupportedError

_MAX_DEPTH = 8
"""The hook is called from a set comprehension in Dynamo's `_compile`: a frame or two away."""


def _refuse_eager_runs() -> str:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_DEPTH):
        if frame is None or {"compiler_fn", "cache_size", "compile_id", "code"} <= frame.f_locals.keys():
            break
        frame = frame.f_back
    else:
        frame = None
    if frame is not None and _is_chunkc(frame.f_locals["compiler_fn"]):
        found = frame.f_locals
        exceeded, limit = exceeds_recompile_limit(found["cache_size"], found["compile_id"])
        if exceeded:
            code = found["code"]
            raise UnsupportedError(
                f"Dynamo has compiled {code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) as often as "
                f"torch._dynamo.config.{limit} allows, and would run it eagerly from now on, outside the memory "
                "budget: raise that limit, or call torch._dynamo.reset() when models are gone; "
                'TORCH_LOGS="recompiles" says what was compiled anew, and why'
            )
    return ""


def _is_chunkc(compiler: Any) -> bool:
    """Whether a compiler function of Dynamo's is this backend, below what wraps it."""
    while compiler is not None:
        if (
            getattr(compiler, "compiler_name", None) == "chunkc"
            or getattr(compiler, "__module__", "") == "chunkc.backend"
        ):
            return True
        inner = getattr(compiler, "_torchdynamo_orig_backend", None) or getattr(compiler, "compiler_fn", None)
        compiler = inner or getattr(compiler, "__wrapped__", None)
    return False


def watch() -> None:
    """Register the hook, once a process."""
    register_hook_for_recompile_user_context(_refuse_eager_runs)
