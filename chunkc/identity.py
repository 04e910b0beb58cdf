"""Weak references to parameters as keys."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class WeakIdentity(weakref.ref[nn.Parameter]):
    """A weak reference to a parameter, equal to another of the same one. (Tensors are equal element by element.)"""

    __slots__ = ("_key",)

    def __new__(cls, parameter: nn.Parameter, lost: Callable[[Any], None]) -> WeakIdentity:
        return super().__new__(cls, parameter, lost)

    def __init__(self, parameter: nn.Parameter, lost: Callable[[Any], None]) -> None:
        super().__init__(parameter, lost)  # type: ignore[call-arg]
        self._key = id(parameter)

    def __hash__(self) -> int:
        return self._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeakIdentity) and other._key == self._key
