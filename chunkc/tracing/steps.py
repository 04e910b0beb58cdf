"""Find the captured step at the sizes of a call: one for static shapes, one per set of sizes for dynamic ones.

With dynamic shapes the sizes are read off the call's arguments. Segments are compiled once for all sizes; bytes, and so
plans, differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import sympy
import torch
from torch import Tensor

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.passes.graphs.graphs import placeholders
from chunkc.policy.captured_step import Captured
from chunkc.policy.needs import StepNeeds
from chunkc.policy.state import Forms
from chunkc.tracing.build import Builder
from chunkc.tracing.capture import TracedGraphs
from chunkc.tracing.dynamic_shapes import Templates, input_symbols
from chunkc.utils.recent import Recent

INPUTS = "inputs"
"""The inputs of Dynamo's graph, in place of a phase's name, as a list of arguments to read sizes off."""

MAX_SIZES = 64
"""Sets of sizes for which steps are kept, with their plans; the least recently used is dropped."""

MAX_PLANS = 32
"""Plans that are kept of one step; the least recently used is dropped."""

MAX_AGREED = 16
"""Combinations of the ranks' sizes that are kept with a step."""


@dataclass
class SizedStep:
    """A captured step at one set of sizes, with its plans.

    Attributes:
        described_in_segments: for a whole step, describes it in segments, without compiling: so with Inductor its bytes
            are upper bounds.
        plans: by the requests that they were made for.
        planned: what `plans` has for a call, by what the call asks for: it is found again without a decision.
        admitted: the residency under which the step was found to fit (`PlannerState.residency`).
        noted: the most that the step has needed, in its form and in segments.
        history: over ranks, a name for what its plans came from; if it is equal on all ranks, either all of them have a
            plan for a call or none has. None: it has no plan yet.
        agreed: the step as ranks with different sizes have agreed on it, by the needs of each.
    """

    forms: Forms
    described_in_segments: InitVar[Callable[[], Captured] | None] = None
    plans: Recent[tuple, Any] = field(default_factory=lambda: Recent(MAX_PLANS))
    planned: Recent[tuple, Any] = field(default_factory=lambda: Recent(MAX_PLANS))
    admitted: tuple[frozenset[int], frozenset[int]] | None = None
    history: str | None = None
    agreed: Recent[tuple[str, ...], SizedStep] = field(default_factory=lambda: Recent(MAX_AGREED))

    def __post_init__(self, described_in_segments: Callable[[], Captured] | None) -> None:
        self.noted = StepNeeds(self.captured, described_in_segments)

    @property
    def captured(self) -> Captured:
        """The captured step, in its present form."""
        return self.forms.captured

    def become(self, captured: Captured) -> None:
        """Replace the captured step by another of its forms."""
        if captured is not self.captured:
            self.forms, self.admitted = Forms(captured), None
            self.plans, self.planned = Recent(MAX_PLANS), Recent(MAX_PLANS)
            self.history = None
            self.noted = StepNeeds(captured)

    def begin_anew(self, history: str) -> None:
        """Forget all plans."""
        self.plans, self.planned, self.history = Recent(MAX_PLANS), Recent(MAX_PLANS), history


class Steps(Protocol):
    """A captured graph at any sizes it serves."""

    def at(self, where: str, arguments: Sequence[Any], *, can_skip_segmentation: bool) -> SizedStep:
        """Return the step at the sizes of these arguments.

        Args:
            where: INPUTS, or the phase with these arguments, FORWARD or BACKWARD.
        """
        ...


class StaticSteps:
    """A graph of static shapes."""

    def __init__(self, captured: Captured, builder: Builder) -> None:
        if captured.whole:
            described = cache(partial(builder.described, whole=False, estimated=True))
            self.step = SizedStep(Forms(captured, partial(builder.described, whole=False)), described)
        else:
            self.step = SizedStep(Forms(captured))

    def at(self, where: str, arguments: Sequence[Any], *, can_skip_segmentation: bool) -> SizedStep:
        return self.step


class SymbolicSteps:
    """A graph of dynamic shapes."""

    def __init__(self, templates: Templates, capture: TracedGraphs, inputs: Sequence[Any]) -> None:
        """`inputs`: those of Dynamo's graph, as they were traced.

        Raises:
            UnsupportedError: a size cannot be read off the inputs of the graph or of a phase.
        """
        of_inputs = input_symbols(capture)
        symbols = [symbol for symbol in templates.traced if symbol in of_inputs]
        self._constant = {symbol: value for symbol, value in templates.traced.items() if symbol not in of_inputs}
        self._templates = templates
        self._readers = {INPUTS: SizeReader(symbols, inputs)}
        for phase, graph in ((FORWARD, capture.forward), (BACKWARD, capture.backward)):
            if graph is not None:
                values = [node.meta.get("val") for node in placeholders(graph.graph)]
                self._readers[phase] = SizeReader(symbols, values)
        self._steps: Recent[tuple[int, ...], SizedStep] = Recent(MAX_SIZES)

    def at(self, where: str, arguments: Sequence[Any], *, can_skip_segmentation: bool) -> SizedStep:
        """Find or describe the step, as `Steps.at`.

        Raises:
            UnsupportedError: an operator's memory is not known at these sizes.
        """
        values = {**self._readers[where].read(arguments), **self._constant}
        known = self._steps.find(tuple(values.values()))
        if known is None or (where == INPUTS and known.captured.whole and not can_skip_segmentation):
            return self._described(values, can_skip_segmentation)
        return known

    def as_traced(self, *, can_skip_segmentation: bool) -> SizedStep:
        """Return the step at the sizes it was traced at."""
        traced = {symbol: n for symbol, n in self._templates.traced.items() if symbol not in self._constant}
        return self._described({**traced, **self._constant}, can_skip_segmentation)

    def _described(self, values: Mapping[sympy.Symbol, int], can_skip_segmentation: bool) -> SizedStep:
        captured = self._templates.at(values, can_skip_segmentation=can_skip_segmentation)
        step = SizedStep(Forms(captured))
        if captured.whole:
            templates = self._templates
            described = cache(lambda: templates.template(values, whole=False, estimated=True).at(values))
            step = SizedStep(Forms(captured, partial(templates.at, values, can_skip_segmentation=False)), described)
        return self._steps.keep(tuple(values.values()), step)


class SizeReader:
    """Reads the values of symbols off a list of arguments: numbers, and lengths of tensors' dimensions."""

    def __init__(self, symbols: Sequence[sympy.Symbol], traced: Sequence[Any]) -> None:
        """`traced`: the arguments as they were traced.

        Raises:
            UnsupportedError: a symbol is none of the arguments' numbers or lengths.
        """
        found: dict[sympy.Symbol, tuple[int, int | None]] = {}
        for position, value in enumerate(traced):
            if isinstance(value, Tensor):
                for dim, length in enumerate(value.shape):
                    found.setdefault(_expression(length), (position, dim))
            else:
                found.setdefault(_expression(value), (position, None))
        missing = [str(symbol) for symbol in symbols if symbol not in found]
        if missing:
            raise UnsupportedError(f"{', '.join(missing)} cannot be read off the sizes of a call's arguments")
        self._places = {symbol: found[symbol] for symbol in symbols}

    def read(self, arguments: Sequence[Any]) -> Mapping[sympy.Symbol, int]:
        """Return the value of every symbol in a call with these arguments."""
        return {
            symbol: int(arguments[position] if dim is None else arguments[position].shape[dim])
            for symbol, (position, dim) in self._places.items()
        }


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else None
