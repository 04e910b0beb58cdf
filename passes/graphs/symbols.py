"""Handle sizes that may depend on symbols: integers if they are known, sympy expressions otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from chunkc.torch_private.fake import FakeTensor

Size: TypeAlias = int | sympy.Expr
"""A number, or an expression in the symbols of the graph's `ShapeEnv`."""


def size_of(value: int | torch.SymInt | sympy.Expr) -> Size:
    """Convert a size to a number or an expanded expression; nothing is guarded on."""
    if isinstance(value, torch.SymInt):
        value = value.node.expr
    if isinstance(value, sympy.Expr):
        value = sympy.expand(value)
    return int(value) if isinstance(value, int | sympy.Integer) else value


def shape_env_of(values: Iterable[object]) -> ShapeEnv | None:
    """Return the environment of the symbols in fake tensors and symbolic numbers; None: there are none."""
    for leaf in pytree.tree_leaves(list(values)):
        if isinstance(leaf, FakeTensor) and leaf.fake_mode.shape_env is not None:
            return leaf.fake_mode.shape_env
        if isinstance(leaf, torch.SymInt):
            return leaf.node.shape_env
    return None


def free_symbols(values: Iterable[object]) -> Iterator[sympy.Symbol]:
    """Yield the symbols in the sizes, strides and offsets of tensors, and in symbolic numbers, anywhere in `values`."""
    for leaf in pytree.tree_leaves(list(values)):
        numbers: tuple[object, ...] = (leaf,)
        if isinstance(leaf, torch.Tensor):
            numbers = (*leaf.shape, *leaf.stride(), leaf.storage_offset())
        for number in numbers:
            if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool):
                yield from sorted(number.node.expr.free_symbols, key=str)


def hint(value: Any) -> Any:
    """Return the number that a symbolic one stands for in tracing; nothing is guarded on."""
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat) else value


def plain_symbol(value: object) -> sympy.Symbol | None:
    """Return the symbol of a symbolic number, if it is that and nothing more."""
    expression = value.node.expr if isinstance(value, torch.SymInt) else None
    return expression if isinstance(expression, sympy.Symbol) else None


def region(shape_env: ShapeEnv) -> tuple[sympy.Basic, ...]:
    """Return the conditions on symbols that tracing and compilation relied on so far: if they hold, the code is valid.

    Ranges of the symbols come first. A compiler may add conditions with every segment; to the frame that Dynamo
    captured they are guards like any other, so a shape outside is never run with this code.
    """
    conditions: list[sympy.Basic] = []
    for symbol, bounds in sorted(shape_env.var_to_range.items(), key=lambda item: str(item[0])):
        if symbol not in shape_env.replacements:
            conditions += [sympy.Ge(symbol, bounds.lower)] if bounds.lower.is_Integer else []
            conditions += [sympy.Le(symbol, bounds.upper)] if bounds.upper.is_Integer else []
    conditions += [sympy.Eq(symbol, value) for symbol, value in shape_env.replacements.items()]
    conditions += [guard.expr for guard in shape_env.guards]
    return tuple(dict.fromkeys(condition for condition in conditions if condition is not sympy.true))
