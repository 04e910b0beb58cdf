"""Where Dynamo stops compiling a function, an error, instead of code that runs outside of any plan.

After `torch._dynamo.config.recompile_limit` compilations of one function Dynamo warns, and calls it uncompiled from
then on: without a plan, and with no regard for the budget. PyTorch has no hook for that which nested compilations
survive, so the function that decides it is wrapped.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import innermost_backend

from chunkc.ir.errors import UnsupportedError


def refuse_beyond_recompile_limit(backend: Callable[..., Any]) -> None:
    """From now on, what Dynamo would have compiled by `backend`, but for a limit, raises an `UnsupportedError`."""
    judge = convert_frame.exceeds_recompile_limit

    @functools.wraps(judge)
    def exceeds(*args: Any) -> tuple[bool, str]:
        exceeded, limit = judge(*args)
        asking = sys._getframe(1).f_locals
        if exceeded and _is(asking.get("compiler_fn"), backend):
            raise UnsupportedError(_message(asking["code"], limit, asking.get("recompile_reason")))
        return exceeded, limit

    convert_frame.exceeds_recompile_limit = exceeds


def _is(compiler: Any, backend: Callable[..., Any]) -> bool:
    """Whether Dynamo's compiler is this backend, below the wrappers of `torch.compile`."""
    if compiler is None:
        return False
    compiler = innermost_backend(compiler)
    return getattr(compiler, "compiler_fn", compiler) is backend


def _message(code: CodeType, limit: str, reason: str | None) -> str:
    times = getattr(torch._dynamo.config, limit)
    return (
        f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) was compiled {times} times, and Dynamo "
        f"compiles no function more often (torch._dynamo.config.{limit} = {times}): it would run uncompiled, outside "
        "of memory_budget. Raise that limit, or keep from the model what changes between calls"
        + (f"; this time: {reason}" if reason else "")
    )
