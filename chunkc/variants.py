"""Keep the variants of a graph: compiled code for given parameters, and for given shapes or for any."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkc.ir.errors import BudgetError, ChunkcError

MAX_SHAPES = 64
"""Variants for the same parameters that are kept; the one that was not used for longest goes."""


class Variants:
    """A graph compiled once per set of parameters, and once for all shapes where that can be, else per set of shapes.

    Dynamo gives one graph to all modules that look alike (blocks in a loop with a graph break), and symbolic shapes to
    a graph with input shapes that change; plans are for given parameters and given shapes. Variants with parameters
    that are gone are forgotten, and so are the shapes not used for longest where there are many (`MAX_SHAPES`).
    """

    def __init__(
        self,
        compile_for: Callable[[Sequence[Any]], Callable[..., Any]],
        lock: AbstractContextManager[Any] | None = None,
        completed: Callable[[BudgetError], BudgetError] = lambda error: error,
    ) -> None:
        """Begin without variants.

        Args:
            compile_for: compiles the graph for a call's inputs.
            lock: held while a call compiles.
            completed: gives the error to raise, asked while the call is on the stack.
        """
        self.compile_for = compile_for
        self._completed = completed
        self._lock = lock or nullcontext()
        self._variants: list[Variant] = []
        self._num_calls = 0
        self.for_any_shapes: Callable[[Sequence[Any]], Variant] | None = None
        """Compiles for other parameters of the same layout once for all shapes; None where each shape is compiled."""
        self.error_of_next: ChunkcError | None = None
        """Why the graph could not be compiled for the call that comes next; it says nothing of later ones."""

    def compile(self, inputs: Sequence[Any], *, any_shapes: bool = False) -> Variant:
        """Compile for these inputs: those of them that are parameters, and, unless it serves any, their shapes."""
        return self.add(self.compile_for(inputs), inputs, any_shapes=any_shapes)

    def add(self, call: Callable[..., Any], inputs: Sequence[Any], *, any_shapes: bool = False) -> Variant:
        """Keep what was compiled for these inputs."""
        identities = tuple(None if any_shapes and not isinstance(v, nn.Parameter) else _identity(v) for v in inputs)
        variant = Variant(identities, call, self._num_calls)
        known = [other for other in self._variants if None not in other.parameters]
        alike = [other for other in known if other.parameters == variant.parameters]
        if len(alike) >= MAX_SHAPES:
            known.remove(min(alike, key=lambda other: other.last_call))
        self._variants = [variant, *known]
        return variant

    def __call__(self, *args: Any) -> Any:
        try:
            return self._call(args)
        except BudgetError as error:
            full = self._completed(error)
            if full is error:
                del full  # an error keeps this frame, and would keep itself
                raise
        try:
            raise full
        finally:
            del full

    def _call(self, args: tuple[Any, ...]) -> Any:
        variant = self._serving(args)
        if variant is None:
            with self._lock:  # another thread may have compiled it meanwhile
                variant = self._serving(args) or (self.for_any_shapes or self.compile)(args)
        return variant.call(*args)

    def _serving(self, args: Sequence[Any]) -> Variant | None:
        self._num_calls += 1
        if self.error_of_next is not None:
            error, self.error_of_next = self.error_of_next, None
            cause = error.__cause__
            try:
                raise copy.copy(
                    error
                ) from cause  # a caller that keeps the original keeps no frames, with their arguments
            finally:
                del error, cause
        for variant in self._variants:
            if variant.serves(args):
                variant.last_call = self._num_calls
                return variant
        return None


@dataclass(eq=False)
class Variant:
    """Compiled code of a graph for one set of inputs.

    Attributes:
        identities: None for an input that may be anything Dynamo's guards let pass.
        call: it may have an attribute `is_over`: a function that tells whether the variant has expired.
    """

    identities: tuple[Any, ...]
    call: Callable[..., Any]
    last_call: int

    @property
    def parameters(self) -> tuple[int | None, ...]:
        """The parameters' identities; None for one that is gone."""
        found = [identity() for identity in self.identities if isinstance(identity, weakref.ref)]
        return tuple(None if parameter is None else id(parameter) for parameter in found)

    def serves(self, args: Sequence[Any]) -> bool:
        if getattr(self.call, "is_over", lambda: False)():
            return False
        for identity, value in zip(self.identities, args, strict=True):
            if isinstance(identity, weakref.ref):
                if identity() is not value:
                    return False
            elif identity is not None and identity != _identity(value):
                return False
        return True


def _identity(value: object) -> Any:
    """Return what must be equal for a compiled variant to serve: the very parameter, a tensor's layout, a number."""
    if isinstance(value, nn.Parameter):
        return weakref.ref(value)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return value
