"""AOTAutograd's check of custom operators, and only of these: the first call of a graph takes what every call takes.

AOTAutograd runs a graph's first call in a dispatch mode that looks whether a custom operator returns memory it was
given. The mode sends every operator through Python, which holds what the operator is given, the tensor that PyTorch
makes of the `5` in `x + 5` too: bytes that no plan counts, and that no later call takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chunkc.torch_private.aot import ALIAS_CHECK, checks_aliases


class CheckedOnce:
    """A callable that is checked the first time."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._is_first = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first and ALIAS_CHECK is not None and checks_aliases():
            self._is_first = False
            with ALIAS_CHECK():
                return self._function(*args, **kwargs)
        return self._function(*args, **kwargs)
