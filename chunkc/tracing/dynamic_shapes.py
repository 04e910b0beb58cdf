"""Describe a step with dynamic shapes in symbols, once, and evaluate the description at each call's sizes.

Rules of operators' memory branch on sizes. A `Template` is valid for sizes at which every rule takes the branches that
it took when the template was made, as the template's conditions say. For other sizes `Templates` makes another one. So
nothing is extrapolated: at all sizes the bytes equal those of `Builder.described` with `ShapesAt` these sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import sympy
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.program import PhaseProgram
from chunkc.passes.graphs.expressions import Expressions, Values, compiled
from chunkc.passes.graphs.graphs import placeholders
from chunkc.passes.graphs.shapes import SymbolicShapes, symbol_values
from chunkc.passes.graphs.symbols import region, size_of
from chunkc.passes.memory.profile import call_steps
from chunkc.policy.captured_step import Captured
from chunkc.torch_private.sizes import int_oo
from chunkc.tracing.build import Builder
from chunkc.tracing.capture import TracedGraphs

MAX_TEMPLATES = 32
"""Templates that are kept of one structure, whole or in segments; the least recently used is dropped."""


@dataclass(frozen=True)
class OperationBytes:
    """Non-model bytes at every operation of forward and backward, in order, as rows over terms (see `Expressions`)."""

    sizes: Expressions
    rows: np.ndarray

    def at(self, values: Values) -> np.ndarray:
        """Return the bytes at every operation."""
        return self.rows @ self.sizes.terms_at(values)

    @property
    def expressions(self) -> tuple[sympy.Expr, ...]:
        return tuple(self.sizes.expression(row) for row in self.rows)


class Template:
    """A step described in symbols."""

    def __init__(self, captured: Captured, conditions: Sequence[sympy.Basic], symbols: Sequence[sympy.Symbol]) -> None:
        """`captured`: its bytes and seconds are numbers or expressions, which are valid where the conditions hold."""
        sizes: dict[Any, int] = {}
        seconds: dict[Any, int] = {}
        # The step with each size and cost replaced by its position in the table of distinct expressions.
        self._skeleton = captured.with_sizes(
            lambda size: sizes.setdefault(size, len(sizes)), lambda cost: seconds.setdefault(cost, len(seconds))
        )
        self.sizes = Expressions(list(sizes), symbols)
        self._seconds_at = compiled([sympy.sympify(cost) for cost in seconds], symbols)
        self.conditions = tuple(conditions)
        self._hold_at = compiled(self.conditions, symbols)

    def holds(self, values: Values) -> bool:
        """Whether the expressions are valid at these values."""
        return all(self._hold_at(values))

    def at(self, values: Values) -> Captured:
        """Return the step at these values."""
        sizes, seconds = self.sizes.at(values), self._seconds_at(values)
        return self._skeleton.with_sizes(sizes.__getitem__, lambda index: float(seconds[int(index)]))

    @cached_property
    def operation_bytes(self) -> OperationBytes:
        """The bytes at each operation, as rows over terms.

        They are sums of sizes, and each size is a row over terms: so they are summed term by term.
        """
        columns = []
        for column in self.sizes.rows.T.tolist():
            part = self._skeleton.with_sizes(column.__getitem__, float)
            columns.append([nbytes for program in part.programs.values() for nbytes in _operation_bytes(program, part)])
        return OperationBytes(self.sizes, np.array(columns, dtype=np.int64).T.copy())


def _operation_bytes(program: PhaseProgram, captured: Captured) -> Iterable[int]:
    extra = captured.output_nbytes if program is captured.forward else 0
    for steps in call_steps(program, captured.memories):
        for step in steps:
            yield step.nbytes + extra


class OtherGraphError(UnsupportedError):
    """At these sizes the model has another graph than the one that was captured, or other code than was compiled."""


class Templates:
    """A builder's step at any values of the symbols that it was captured with.

    Attributes:
        traced: the symbols' values when the step was captured.
        num_described: how many templates were made, counting again those that were dropped (`MAX_TEMPLATES`).
    """

    def __init__(self, builder: Builder) -> None:
        """`builder`: of the graph as it was traced.

        Raises:
            UnsupportedError: something other than the inputs' sizes decides whether the graph is valid, or its bytes.
        """
        self.builder = builder
        self.traced = traced_values(builder.capture)
        _require_own_storages(builder.capture, self.traced)
        self._in_region = self._region()
        self._known: dict[tuple[bool, bool], list[Template]] = {}
        self.num_described = 0

    def holds(self, values: Values) -> bool:
        """Whether the captured graph, and the code compiled for it, are valid at these sizes."""
        return all(self._in_region(values))

    def _region(self) -> Callable[[Values], tuple[int | float | bool, ...]]:
        return compiled(_traced_region(self.builder.capture, self.traced), list(self.traced))

    def _require(self, values: Values) -> None:
        if not self.holds(values):
            sizes = ", ".join(f"{symbol} = {value}" for symbol, value in values.items())
            raise OtherGraphError(f"this graph was not captured for {sizes}")

    def at(self, values: Values, *, can_skip_segmentation: bool = True) -> Captured:
        """Return the step at these sizes: whole if it may be and everything fits, else in segments.

        Raises:
            OtherGraphError: the graph was captured, or compiled by Inductor, for other sizes.
            UnsupportedError: an operator's memory is not known.
        """
        self._require(values)

        def described(whole: bool, estimated: bool) -> Captured:
            return self.template(values, whole, estimated).at(values)

        return self.builder.build(described) if can_skip_segmentation else described(False, False)

    def template(self, values: Values, whole: bool, estimated: bool = False) -> Template:
        """Return the template that holds at these values, made if there is none yet."""
        estimated = estimated and not self.builder.estimate_is_exact
        known = self._known.setdefault((whole, estimated), [])
        for index, template in enumerate(known):
            if template.holds(values):
                known.insert(0, known.pop(index))
                return template
        shapes = SymbolicShapes(values)
        captured = self.builder.described(whole, estimated, shapes)
        self._in_region = self._region()  # compiling has added conditions
        self._require(values)
        template = Template(captured, shapes.conditions, list(self.traced))
        assert template.holds(values)
        known.insert(0, template)
        del known[MAX_TEMPLATES:]
        self.num_described += 1
        return template


def _leaves(capture: TracedGraphs) -> Iterable[Any]:
    for graph in (capture.forward, capture.backward):
        for node in placeholders(graph.graph) if graph is not None else ():
            yield from pytree.tree_leaves(node.meta.get("val"))


def traced_values(capture: TracedGraphs) -> dict[sympy.Symbol, int]:
    """Return the symbols in the inputs of a captured step's phases, with their values in tracing."""
    return symbol_values(_leaves(capture))


def input_symbols(capture: TracedGraphs) -> frozenset[sympy.Symbol]:
    """Return the symbols in a captured step's inputs; none if it is static.

    Other symbols are sizes of real tensors that tracing met, such as the saved state of a random generator: these keep
    their values.
    """
    assert capture.forward is not None
    return frozenset(symbol_values(node.meta.get("val") for node in placeholders(capture.forward.graph)))


def _require_own_storages(capture: TracedGraphs, values: Values) -> None:
    """Refuse inputs that are views of larger tensors: their storage's size is a constant or a symbol of no input.

    Raises:
        UnsupportedError: an input is such a view.
    """
    assert capture.forward is not None
    for node in placeholders(capture.forward.graph):
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, Tensor) and not isinstance(leaf.numel(), int):
                nbytes = size_of(leaf.untyped_storage().nbytes())
                if isinstance(nbytes, int) or not nbytes.free_symbols <= values.keys():
                    raise UnsupportedError(f"input {node.name} is a view of a larger tensor; pass a copy of it")


def _traced_region(capture: TracedGraphs, values: Values) -> tuple[sympy.Basic, ...]:
    """Collect the conditions on which tracing relied, in the symbols of `values`.

    Raises:
        UnsupportedError: a condition has other symbols, too.
    """
    found: dict[sympy.Basic, None] = {}
    for env in _environments(capture):
        for condition in region(env):
            condition = env.replace(condition)
            if condition is sympy.true or int_oo in condition.args:  # "below infinity" is always true
                continue
            if condition.free_symbols.isdisjoint(values):  # Dynamo guards inputs that the graph does not take
                continue
            if not condition.free_symbols <= values.keys():
                raise UnsupportedError(f"the graph is valid only where {condition}, which its inputs do not say")
            found[condition] = None
    return tuple(found)


def _environments(capture: TracedGraphs) -> list[ShapeEnv]:
    found: dict[int, ShapeEnv] = {}
    for leaf in _leaves(capture):
        numbers = (*leaf.shape, *leaf.stride()) if isinstance(leaf, Tensor) else (leaf,)
        for number in numbers:
            if hasattr(number, "node"):
                found[id(number.node.shape_env)] = number.node.shape_env
    return list(found.values())
