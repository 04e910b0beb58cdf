"""Decide what becomes of a function that Dynamo no longer compiles.

After `torch._dynamo.config.recompile_limit` compilations of one function Dynamo warns, and calls it uncompiled from
then on: without a plan, and with no regard for the budget. A function that works with parameters is refused instead.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from chunkc.ir.errors import UnsupportedError
from chunkc.torch_private.dynamo import RecompileLimit

logger = logging.getLogger(__name__)

MAX_SEARCHED = 4096
"""Objects of a function's surroundings that are searched for modules; a function that reaches more is refused."""

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
    """Whether all graphs of the function had no parameters, and nothing is in its reach that has some."""
    key = id(limit.code)
    if key in _with_parameters or key not in _without_parameters:
        return False
    names = frozenset(_names(limit.code))
    in_scope = chain(limit.local_values, (limit.global_values[name] for name in names & limit.global_values.keys()))
    return not _reaches_parameters(in_scope, names)


def _reaches_parameters(values: Iterable[Any], names: frozenset[str]) -> bool:
    """Whether a module with parameters, or a parameter, can be reached from the values of a function's variables.

    Args:
        names: of the attributes and global variables that the function's code uses.
    """
    searched: dict[int, Any] = {}
    frontier = list(values)
    while frontier:
        value = frontier.pop()
        if isinstance(value, nn.Parameter) or (isinstance(value, nn.Module) and any(True for _ in value.parameters())):
            return True
        if id(value) not in searched:
            searched[id(value)] = value  # alive, so that no other value gets its id
            if len(searched) > MAX_SEARCHED:
                return True
            frontier.extend(_parts(value, names))
    return False


def _parts(value: Any, names: frozenset[str]) -> Iterator[Any]:
    """The values that code with a value at hand may reach by it."""
    if isinstance(value, ModuleType):
        if value.__name__.partition(".")[0] != "torch":
            yield from (vars(value)[name] for name in names & vars(value).keys())
    elif isinstance(value, FunctionType):
        yield from value.__closure__ or ()
        yield from (value.__defaults__ or (), value.__kwdefaults__ or {}, vars(value))
        if not str(value.__module__).startswith("torch."):
            yield from (value.__globals__[name] for name in set(_names(value.__code__)) & value.__globals__.keys())
    elif isinstance(value, (MethodType, BuiltinFunctionType)):
        yield value.__self__
    elif isinstance(value, CellType):
        yield from _contents(value)
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif not isinstance(value, (torch.Tensor, type)) and hasattr(value, "__dict__"):
        yield vars(value)


def _contents(cell: CellType) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # empty so far
        return


def _names(code: CodeType) -> Iterator[str]:
    """The names of global variables and attributes in a function's code and in that of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
