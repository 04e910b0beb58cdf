"""Remember the modules that the user gave to `torch.compile(backend="chunkc")`, whatever Dynamo compiles of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from types import FunctionType
from typing import Any

from torch import nn

from chunkc.utils.reach import has_parameters, within_reach

MAX_VALUES = 4096
"""Values within a function's reach that are searched for modules."""


class GivenModules:
    """The modules that were given, and the functions and other objects that may reach some. All are held weakly.

    Attributes:
        num_notes: how often something new was given.
    """

    def __init__(self) -> None:
        self.num_notes = 0
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._functions: weakref.WeakSet[FunctionType] = weakref.WeakSet()
        self._objects: dict[int, tuple[weakref.ref[Any], weakref.ref[FunctionType]]] = {}

    def note(self, given: Callable[..., Any]) -> None:
        """Note a callable that is to be compiled, or a module that a function gets."""
        owner = getattr(given, "__self__", given)
        if isinstance(owner, nn.Module):
            self.num_notes += owner not in self._modules
            self._modules.add(owner)
        elif isinstance(given, FunctionType):
            self.num_notes += 1
            self._functions.add(given)
        elif isinstance(given, partial):
            for value in (given.func, *given.args, *given.keywords.values()):
                if callable(value):
                    self.note(value)
        else:
            function = getattr(given, "__func__", type(given).__call__)
            if isinstance(function, FunctionType):
                self.num_notes += 1
                try:
                    self._objects[id(owner)] = weakref.ref(owner), weakref.ref(function)
                except TypeError:  # an object with slots may have no weak references: what it reaches now is noted
                    self._modules.update(_modules_within_reach(owner, function))

    def with_parameters(self) -> list[nn.Module]:
        """Return the modules that have parameters, except those inside another of them."""
        modules = {id(module): module for module in list(self._modules) if has_parameters(module)}
        for root, function in self._roots():
            modules.update((id(module), module) for module in _modules_within_reach(root, function))
        inside = {id(part) for module in modules.values() for part in module.modules() if part is not module}
        return [module for key, module in modules.items() if key not in inside]

    def _roots(self) -> Iterator[tuple[Any, FunctionType]]:
        """Yield the functions, and the objects with what their calls run, that are still alive."""
        yield from ((function, function) for function in list(self._functions))
        for key, references in list(self._objects.items()):
            root, function = (reference() for reference in references)
            if root is None or function is None:
                del self._objects[key]
            else:
                yield root, function


def _modules_within_reach(root: Any, function: FunctionType) -> list[nn.Module]:
    """Return the modules with parameters that a function may reach by itself and by the object it belongs to."""
    reached = within_reach(function.__code__, [root], function.__globals__)
    return [v for v in islice(reached, MAX_VALUES) if isinstance(v, nn.Module) and has_parameters(v)]


GIVEN = GivenModules()
"""Those of this process."""
