"""Walk over the values that a function's code may reach from its variables."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn


def within_reach(code: CodeType, local_values: Iterable[Any], global_values: Mapping[str, Any]) -> Iterator[Any]:
    """Yield each value that code may reach from its variables by attributes, items and calls, once and breadth first.

    A caller that stops early has the nearest values, however long the lists among them are. The search does not go
    into PyTorch's own modules and functions, classes, tensors, or modules with parameters.

    Args:
        local_values: values of the code's local variables.
        global_values: all global variables, by name; only those that the code names are visited.
    """
    names = frozenset(_names(code))
    visited: dict[int, Any] = {}
    in_globals = [global_values[name] for name in names & global_values.keys()]
    frontier: deque[Iterator[Any]] = deque([chain(local_values, in_globals)])
    while frontier:
        for value in frontier.popleft():
            if id(value) not in visited:
                visited[id(value)] = value  # keeps it alive, so that no other value gets its id
                yield value
                frontier.append(_parts(value, names))


def has_parameters(value: Any) -> bool:
    """Whether a value is a parameter, or a module with parameters."""
    return isinstance(value, nn.Parameter) or (isinstance(value, nn.Module) and any(True for _ in value.parameters()))


def _parts(value: Any, names: Collection[str]) -> Iterator[Any]:
    """Yield the values that code may reach from a value in one step.

    Args:
        names: names of the attributes and global variables that the code uses.
    """
    if isinstance(value, ModuleType):
        if value.__name__.partition(".")[0] != "torch":
            yield from (vars(value)[name] for name in names if name in vars(value))
    elif isinstance(value, FunctionType):
        yield from value.__closure__ or ()
        yield from (value.__defaults__, value.__kwdefaults__, vars(value))
        if not str(value.__module__).startswith("torch."):
            of_globals = value.__globals__
            yield from (of_globals[name] for name in _names(value.__code__) if name in of_globals)
    elif isinstance(value, (MethodType, BuiltinFunctionType)):
        yield value.__self__
        yield getattr(value, "__func__", None)
    elif isinstance(value, CellType):
        yield from _contents(value)
    elif isinstance(value, dict):
        yield from list(value.values())  # another thread may add to it meanwhile
    elif isinstance(value, set):
        yield from list(value)
    elif isinstance(value, (list, tuple, frozenset)):
        yield from value
    elif not isinstance(value, (torch.Tensor, type)) and not has_parameters(value):
        if hasattr(value, "__dict__"):
            yield vars(value)
        yield from _in_slots(value)


def _in_slots(value: Any) -> Iterator[Any]:
    """Yield what an object holds in the slots that its classes name."""
    for cls in type(value).__mro__:
        for descriptor in vars(cls).values():
            if isinstance(descriptor, MemberDescriptorType):
                with suppress(AttributeError):  # the slot is still empty
                    yield descriptor.__get__(value)


def _contents(cell: CellType) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # the cell is still empty
        return


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of global variables and attributes in a function's code, and in functions defined inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
