"""Remember the modules that the user gave to `torch.compile(backend="chunkc")`, whatever Dynamo compiles of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import islice
from types import FunctionType
from typing import Any

from torch import nn

from chunkc.utils.reach import has_parameters, within_reach

MAX_VALUES = 4096
"""Values within a function's reach that are searched for modules."""


class GivenModules:
    """The modules that were given, and the functions, which may reach some. Both are held weakly.

    Attributes:
        num_notes: how often something new was given.
    """

    def __init__(self) -> None:
        self.num_notes = 0
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._functions: weakref.WeakSet[FunctionType] = weakref.WeakSet()

    def note(self, given: Callable[..., Any]) -> None:
        """Note a module, a module's method, or a function, that is to be compiled, or a module that a function gets."""
        owner = getattr(given, "__self__", given)
        if isinstance(owner, nn.Module):
            self.num_notes += owner not in self._modules
            self._modules.add(owner)
        elif isinstance(given, FunctionType):
            self.num_notes += 1
            self._functions.add(given)

    def with_parameters(self) -> list[nn.Module]:
        """Return the modules that have parameters, except those inside another of them."""
        modules = {id(module): module for module in list(self._modules) if has_parameters(module)}
        for function in list(self._functions):
            reached = within_reach(function.__code__, [function], function.__globals__)
            for value in islice(reached, MAX_VALUES):
                if isinstance(value, nn.Module) and has_parameters(value):
                    modules[id(value)] = value
        inside = {id(part) for module in modules.values() for part in module.modules() if part is not module}
        return [module for key, module in modules.items() if key not in inside]


GIVEN = GivenModules()
"""Those of this process."""
