"""Limit AOTAutograd's alias check to custom operators on their first call, so that every call takes the same memory.

AOTAutograd runs a graph's first call in a dispatch mode that checks whether a custom operator returns memory it was
given. The mode sends every operator through Python, which holds the operator's arguments, including the tensor that
PyTorch makes of the `5` in `x + 5`: bytes that no plan counts, and that no later call takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chunkc.torch_private.aot import ALIAS_CHECK, checks_aliases


class CheckedOnce:
    """Callable that is checked for aliases on its first call only."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._is_first = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first and ALIAS_CHECK is not None and checks_aliases():
            self._is_first = False
            with ALIAS_CHECK():
                return self._function(*args, **kwargs)
        return self._function(*args, **kwargs)
