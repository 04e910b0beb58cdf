"""Where Dynamo stops compiling a function, an error, instead of code that runs outside of any plan.

After `torch._dynamo.config.recompile_limit` compilations of one function Dynamo warns, and calls it uncompiled from
then on: without a plan, and with no regard for the budget.
"""

from __future__ import annotations

from types import CodeType

from chunkc.ir.errors import UnsupportedError


def refuse(code: CodeType, limit: str, times: int, reason: str | None) -> None:
    """What Dynamo no longer compiles is not run either.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) was compiled {times} times, and Dynamo "
        f"compiles no function more often (torch._dynamo.config.{limit} = {times}): it would run uncompiled, outside "
        "of memory_budget. Raise that limit, or keep from the model what changes between calls"
        + (f"; this time: {reason}" if reason else "")
    )
