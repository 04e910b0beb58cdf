"""Use parameters as weak keys, by identity: `==` of tensors compares elements."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import nn

V = TypeVar("V")


class WeakIdentity(weakref.ref[nn.Parameter]):
    """A weak reference to a parameter; equal to other weak references to that parameter, also after its end."""

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


class ByIdentity(Generic[V]):
    """A mapping from parameters to values; an entry goes with its parameter.

    Like `torch.utils.weak.WeakTensorKeyDictionary`, but a look-up takes a sixth of the time; a step has several for
    each parameter. Threads may read and write concurrently.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[WeakIdentity, V]] = {}

    def get(self, parameter: torch.Tensor) -> V | None:
        entry = self._entries.get(id(parameter))
        return entry[1] if entry is not None and entry[0]() is parameter else None

    def __setitem__(self, parameter: nn.Parameter, value: V) -> None:
        self._entries[id(parameter)] = WeakIdentity(parameter, self._lost), value

    def __delitem__(self, parameter: nn.Parameter) -> None:
        del self._entries[id(parameter)]

    def values(self) -> list[V]:
        return [value for _, value in list(self._entries.values())]

    def _lost(self, reference: WeakIdentity) -> None:
        """Remove the entry of a parameter that is gone, unless a new parameter has its `id` by now."""
        number = hash(reference)
        entry = self._entries.get(number)
        if entry is not None and entry[0] is reference:
            del self._entries[number]
