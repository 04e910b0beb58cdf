"""Decide what becomes of a function that Dynamo no longer compiles.

After `torch._dynamo.config.recompile_limit` compilations of one function Dynamo warns, and calls it uncompiled from
then on: without a plan, and with no regard for the budget. A function that works with parameters is refused instead.
"""

from __future__ import annotations

import logging
import weakref
from types import CodeType

from chunkc.ir.errors import UnsupportedError
from chunkc.torch_private.dynamo import RecompileLimit
from chunkc.utils.reach import has_parameters, within_reach

logger = logging.getLogger(__name__)

MAX_SEARCHED = 4096
"""Values within a function's reach that are searched for parameters; a function that reaches more is refused."""

_with_parameters: weakref.WeakValueDictionary[int, CodeType] = weakref.WeakValueDictionary()
_without_parameters: weakref.WeakValueDictionary[int, CodeType] = weakref.WeakValueDictionary()
"""Code of which a graph was compiled, by its `id`: code objects are equal by value, also those of other files."""


def note_graph(code: CodeType | None, *, is_helper: bool) -> None:
    """Note that a graph was compiled of a function's code.

    Args:
        code: None where Dynamo does not compile a function, but hands over a graph.
        is_helper: the graph is all of the function, and takes no parameters.
    """
    if code is not None:
        (_without_parameters if is_helper else _with_parameters)[id(code)] = code


def at_limit(limit: RecompileLimit) -> None:
    """Warn where a function without parameters runs uncompiled from now on, as Dynamo then has it, and refuse others.

    Raises:
        UnsupportedError: the function has parameters, or may reach some.
    """
    code = limit.code
    where = (
        f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) was compiled {limit.times} times, and Dynamo "
        f"compiles no function more often (torch._dynamo.config.{limit.option} = {limit.times})"
    )
    reason = f"; this time: {' '.join(limit.reason.splitlines()[0].split())}" if limit.reason else ""
    if limit.is_whole_graph or not _is_helper(limit):
        raise UnsupportedError(
            f"{where}: it would run uncompiled, outside of memory_budget. Raise that limit, or keep from the model "
            f"what changes between calls{reason}"
        )
    logger.warning(
        "%s: it has no parameters, so it runs uncompiled in such calls, and memory_budget does not count the values "
        "that it makes. To have them counted, raise that limit%s",
        where,
        reason,
    )


def _is_helper(limit: RecompileLimit) -> bool:
    """Whether all graphs of the function had no parameters, and nothing within its reach has some."""
    key = id(limit.code)
    if key in _with_parameters or key not in _without_parameters:
        return False
    reached = within_reach(limit.code, limit.local_values, limit.global_values)
    return not any(has_parameters(value) or number >= MAX_SEARCHED for number, value in enumerate(reached))
