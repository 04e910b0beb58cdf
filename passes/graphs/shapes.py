"""Translate the sizes of a traced graph: as they were traced, at given numbers, or in symbols.

A graph traced with dynamic shapes has fake tensors with expressions as sizes. The scratch of an operator depends on
sizes by rules with branches (`scratch`). So a rule never sees those tensors: it gets others of the same layout, with
sizes that are plain numbers (`ShapesAt`), or symbols of a `ShapeEnv` of this module's own (`SymbolicShapes`). There
each branch that a rule takes is noted as a guard, and Dynamo's own guards, by which it decides when to capture again,
are left as they were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree

from chunkc.ir.errors import UnsupportedError
from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.passes.graphs.graphs import storage_nbytes
from chunkc.passes.graphs.symbols import Size, size_of
from chunkc.torch_private.fake import FakeTensorMode, LocalSource

_ASKS_FOR_SIZES = frozenset(
    getattr(torch.ops.aten, name).default
    if name in ("sym_numel", "sym_storage_offset")
    else getattr(torch.ops.aten, name).int
    for name in ("sym_size", "sym_stride", "sym_numel", "sym_storage_offset")
)


class Shapes:
    """Sizes as they were traced: for graphs of static shapes.

    `of` gives the values that rules may read; they compute bytes from it, which `known` converts to the kept form.
    """

    def of(self, values: Any) -> Any:
        """Translate the tensors and numbers among `values`, anywhere in it."""
        return values

    def nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of a traced tensor's storage."""
        return storage_nbytes(tensor)

    def own_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of a storage for a traced tensor alone, with its strides; if sizes are symbols, no less."""
        if any(isinstance(number, torch.SymInt) for number in (*tensor.shape, *tensor.stride())):
            return self.nbytes(tensor)
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return _rounded_as(tensor, (1 + reach) * tensor.itemsize if tensor.numel() else 0)

    def known(self, nbytes: int | torch.SymInt) -> Size:
        """Convert bytes to the kept form: a number, or an expression in the traced graph's symbols."""
        return size_of(nbytes)

    def known_s(self, seconds: float) -> float:
        """Convert seconds to the kept form, as `known`."""
        return seconds


AS_TRACED = Shapes()


class _Translated(Shapes, ABC):
    """Replacement tensors for the traced ones, each made once."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (replacement, traced tensor, which is kept alive)
        self._numbers: dict[sympy.Expr, Any] = {}

    def of(self, values: Any) -> Any:
        return pytree.tree_map(self._one, values)

    def nbytes(self, tensor: Tensor) -> int:
        nbytes = self._number(tensor.untyped_storage().nbytes())
        return _rounded_as(tensor, nbytes)

    def _one(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return self._number(value)
        return value

    def _tensor(self, traced: Tensor) -> Tensor:
        if id(traced) not in self._made:
            shape, stride = ([self._number(n) for n in numbers] for numbers in (traced.shape, traced.stride()))
            offset, of_storage = (self._number(n) for n in (traced.storage_offset(), traced.untyped_storage().nbytes()))
            with self._mode, torch.no_grad():
                if traced.device.type == "cpu":  # rules for CPUs do not look at storages
                    made = torch.empty_strided(shape, stride, dtype=traced.dtype, device=traced.device)
                else:
                    base = torch.empty((of_storage // traced.itemsize,), dtype=traced.dtype, device=traced.device)
                    made = base.as_strided(shape, stride, offset)
            self._made[id(traced)] = (made, traced)
        return self._made[id(traced)][0]

    def _number(self, value: Any) -> Any:
        if not isinstance(value, torch.SymInt | torch.SymFloat):
            return value
        expression = value.node.expr
        if expression not in self._numbers:
            self._numbers[expression] = self._from(expression, value.node.pytype)
        return self._numbers[expression]

    @abstractmethod
    def _from(self, expression: sympy.Expr, kind: type) -> Any:
        """Return the number, of the given kind, in place of a traced expression."""


class ShapesAt(_Translated):
    """Sizes at given values of the symbols; tests compare `SymbolicShapes` with it."""

    def __init__(self, values: Mapping[sympy.Symbol, int]) -> None:
        super().__init__(FakeTensorMode())
        self._values = dict(values)

    def _from(self, expression: sympy.Expr, kind: type) -> int | float:
        return kind(_evaluated(expression, self._values))


class SymbolicShapes(_Translated):
    """Sizes in symbols, with every branch decided as at given values; `conditions` holds the decisions."""

    def __init__(self, values: Mapping[sympy.Symbol, int]) -> None:
        self._env = ShapeEnv(duck_shape=False, specialize_zero_one=False, assume_static_by_default=False)
        super().__init__(FakeTensorMode(shape_env=self._env))
        self._values = dict(values)
        self._own: dict[sympy.Symbol, sympy.Symbol] = {}
        for symbol, value in values.items():
            source = LocalSource(str(symbol))
            own = self._env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
            assert isinstance(own, sympy.Symbol)
            self._own[symbol] = own
        self._traced = {own: symbol for symbol, own in self._own.items()}

    def known(self, nbytes: int | torch.SymInt) -> Size:
        return self._in_traced(nbytes)

    def known_s(self, seconds: float) -> float:
        return self._in_traced(seconds)

    def _in_traced(self, value: Any) -> Any:
        """Convert to an expression in the symbols of the traced graph."""
        if not isinstance(value, torch.SymInt | torch.SymFloat):
            return value
        expression = value.node.expr.xreplace(self._traced)
        return size_of(expression) if isinstance(value, torch.SymInt) else expression

    @property
    def conditions(self) -> tuple[sympy.Basic, ...]:
        """Conditions that rules relied on, in the traced graph's symbols."""
        conditions = dict.fromkeys(guard.expr.xreplace(self._traced) for guard in self._env.guards)
        return tuple(condition for condition in conditions if condition is not sympy.true)

    def _from(self, expression: sympy.Expr, kind: type) -> Any:
        hint = kind(_evaluated(expression, self._values))
        if kind is not int:
            return hint  # rules use such a factor only as a number
        return self._env.create_symintnode(expression.xreplace(self._own), hint=hint)


def _evaluated(expression: sympy.Expr, values: Mapping[sympy.Symbol, int]) -> sympy.Expr:
    """Evaluate an expression at given values of its symbols.

    Raises:
        UnsupportedError: it depends on the values of tensors.
    """
    missing = expression.free_symbols - values.keys()
    if missing:
        names = ", ".join(sorted(map(str, missing)))
        raise UnsupportedError(
            f"a size depends on the values of tensors ({names}); chunkc plans sizes that shapes decide: "
            "compute it in a function under torch.compiler.disable"
        )
    number = expression.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    assert number.is_number, number
    return number


def _rounded_as(tensor: Tensor, nbytes: int) -> int:
    return rounded_nbytes(nbytes) if tensor.device.type == "cuda" else nbytes


def is_number(node: fx.Node) -> bool:
    """Whether a node computes a size, or another number from sizes: no operator runs for it."""
    if not isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
        return False
    return not isinstance(node.target, torch._ops.OpOverload) or node.target in _ASKS_FOR_SIZES


def symbol_values(values: Iterable[Any]) -> dict[sympy.Symbol, int]:
    """Return the symbols in the sizes of traced values, each with the number that it stood for when it was traced."""
    hints: dict[sympy.Symbol, int] = {}
    for leaf in pytree.tree_leaves(list(values)):
        numbers = (*leaf.shape, *leaf.stride()) if isinstance(leaf, Tensor) else (leaf,)
        for number in numbers:
            if isinstance(number, torch.SymInt) and isinstance(number.node.expr, sympy.Symbol):
                hints[number.node.expr] = int(number.node.hint)
    return hints


def numbers_first(graph: fx.Graph) -> None:
    """Move computations of sizes alone to the beginning, so that equal blocks give equal segments.

    Of equal computations tracing keeps the first, which would make the first of several equal blocks another segment.
    """
    last = next((node for node in reversed(graph.find_nodes(op="placeholder"))), None)
    if last is None:
        return
    moved = set(graph.find_nodes(op="placeholder"))
    for node in list(graph.nodes):
        if node.op == "call_function" and is_number(node) and all(source in moved for source in node.all_input_nodes):
            last.append(node)
            last = node
            moved.add(node)
