"""Compute the smallest budget of a step as a function of its batch size or sequence length, from few captures.

The dimensions that depend on the size are found by building the arguments at two sizes, and traced as symbols. A
compiler may generate other code for other sizes (Inductor sums more than 4,096 elements otherwise than fewer): the
step is captured again then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from chunkc.explaining.explain import budget_of, options_on, predicted_on
from chunkc.explaining.optimizer_choice import ADAMW, OptimizerChoice
from chunkc.ir.errors import UnsupportedError
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import ChunkLayout
from chunkc.ir.shards import ZeroStage
from chunkc.options import Activations, Options
from chunkc.policy.activation_search import leanest_form
from chunkc.policy.decide import smallest_budget
from chunkc.tracing.dynamic_shapes import OtherGraphError, Templates

TRACED_SIZE = 6
"""The size to trace first; the next larger one is compared with it. Cheap, and no special case as 1 is."""

MAX_CAPTURES = 4
"""If sizes make more graphs than these, each size is likely to make a graph of its own."""

Build = Callable[[int], tuple[nn.Module, Sequence[Any], Mapping[str, Any]]]
"""Size -> model, positional and keyword arguments of one call of it."""


@dataclass(frozen=True)
class Line:
    """A dimension that is `start + slope * size`."""

    start: int
    slope: int

    def at(self, size: int) -> int:
        return self.start + self.slope * size


@dataclass(frozen=True)
class SizedStep:
    """A step at all sizes that make the same graph."""

    templates: Templates
    layout: ChunkLayout
    lines: Mapping[sympy.Symbol, Line]
    activations: Activations

    def minimum_nbytes(self, size: int) -> int | None:
        """Return the smallest budget that works, in bytes; None if this size makes another graph.

        In segments a graph takes the least. If that is more than the budget, it may still fit whole.
        """
        values = {symbol: line.at(size) for symbol, line in self.lines.items()}
        budget_nbytes = self.templates.builder.budget_nbytes
        try:
            in_segments = self.templates.at(values, can_skip_segmentation=False)
            needed_nbytes = smallest_budget(leanest_form(in_segments, self.activations, self.layout), self.layout)
            fits_whole = needed_nbytes > budget_nbytes and self.templates.at(values).whole
        except OtherGraphError:
            return None
        return budget_nbytes if fits_whole else needed_nbytes


class Scaling:
    """A step at any size, captured again for a size that makes another graph.

    Attributes:
        captures: so far, the first at `TRACED_SIZE`.
    """

    def __init__(
        self,
        build: Build,
        options: Options,
        hardware: Hardware,
        choice: OptimizerChoice = ADAMW,
        zero_stage: ZeroStage | None = None,
    ) -> None:
        """Capture the step with its size as a symbol.

        Raises:
            UnsupportedError: the model, or its arguments, depend on the size in another way than by the lengths of
                dimensions; or the model cannot be traced with symbols.
        """
        self._capture = partial(_capture, build, options, hardware, choice, zero_stage)
        self.captures = [self._capture(TRACED_SIZE)]
        self._captures_left = MAX_CAPTURES - 1

    def minimum_nbytes(self, size: int) -> int | None:
        """Return the smallest budget that works, in bytes; None for a size that has to be captured for itself."""
        for capture in reversed(self.captures):
            minimum_nbytes = capture.minimum_nbytes(size)
            if minimum_nbytes is not None:
                return minimum_nbytes
        if size < TRACED_SIZE or self._captures_left == 0:
            return None
        self._captures_left -= 1  # also if it fails: it would fail again at the next size
        try:
            self.captures.append(self._capture(size))
        except UnsupportedError:
            return None
        return self.captures[-1].minimum_nbytes(size)


def _capture(
    build: Build,
    options: Options,
    hardware: Hardware,
    choice: OptimizerChoice,
    zero_stage: ZeroStage | None,
    traced_size: int,
) -> SizedStep:
    """Trace the step at a size that is a symbol.

    Raises:
        UnsupportedError: as `Scaling`.
    """
    options = options_on(hardware, options)
    model, args, kwargs = build(traced_size)
    other_model, *other = build(traced_size + 1)
    if _layouts(model) != _layouts(other_model):
        raise UnsupportedError("the model's own tensors depend on this size")
    leaves, others = (pytree.tree_leaves((tuple(a), dict(k))) for a, k in ((args, kwargs), other))
    lines = _mark(leaves, others, traced_size)
    predicted = predicted_on(hardware, model, args, kwargs, options, choice, dynamic=True, zero_stage=zero_stage)
    graph = predicted.graphs[0]
    graph.builder.budget_nbytes = budget_of(options, hardware)
    templates = graph.templates
    if templates is None or len(predicted.step.calls) > 1 or set(templates.traced.values()) != lines.keys():
        raise UnsupportedError("the model's code takes other branches at other sizes, or makes symbols of its own")
    lines_of = {symbol: lines[length] for symbol, length in templates.traced.items()}
    return SizedStep(templates, graph.layout, lines_of, options.activations)


def _layouts(model: nn.Module) -> list[tuple[torch.Size, torch.dtype]]:
    return [(t.shape, t.dtype) for t in (*model.parameters(), *model.buffers())]


def _mark(leaves: Sequence[Any], others: Sequence[Any], traced_size: int) -> dict[int, Line]:
    """Mark the dimensions that differ as dynamic. Return their length at `traced_size` -> its growth with the size.

    Raises:
        UnsupportedError: something else differs, or two dimensions of one length grow differently.
    """
    if len(leaves) != len(others):
        raise UnsupportedError("the number of arguments depends on this size")
    lines: dict[int, Line] = {}
    for leaf, other in zip(leaves, others):
        if not isinstance(leaf, Tensor):
            if leaf != other:
                raise UnsupportedError("an argument that is no tensor depends on this size")
            continue
        if leaf.dim() != other.dim() or leaf.dtype != other.dtype:
            raise UnsupportedError("the kind of an argument depends on this size")
        for dim, (length, next_length) in enumerate(zip(leaf.shape, other.shape)):
            if length == next_length:
                continue
            slope = next_length - length
            line = Line(length - slope * traced_size, slope)
            if lines.setdefault(length, line) != line:
                raise UnsupportedError("two dimensions of one length depend on this size in different ways")
            torch._dynamo.maybe_mark_dynamic(leaf, dim)
    if not lines:
        raise UnsupportedError("no argument's dimensions depend on this size")
    return lines
