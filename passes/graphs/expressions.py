"""Evaluate many expressions in a few symbols at once.

Bytes are sums of products, so that each is a row of integers over terms that many share (`s0`, `s0*s1`, `s0*(s1//64)`):
evaluating is a handful of terms and one product of a matrix and a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import sympy

from chunkc.passes.graphs.symbols import Size
from chunkc.torch_private.sizes import PythonPrinter

Values = Mapping[sympy.Symbol, int]
"""Value of every symbol."""


class Expressions:
    """Sizes as rows over common terms.

    Attributes:
        terms: products of symbols, or any other expression that is not a sum.
        rows: int64, one per expression, one column per term: the coefficient of each term.
    """

    def __init__(self, sizes: Sequence[Size], symbols: Sequence[sympy.Symbol]) -> None:
        parts = [sympy.expand(sympy.sympify(size)).as_coefficients_dict() for size in sizes]
        self.terms = tuple(sorted({term for part in parts for term in part}, key=str))
        self._terms_at = compiled(self.terms, symbols)
        column = {term: index for index, term in enumerate(self.terms)}
        self.rows = np.zeros((len(sizes), len(self.terms)), dtype=np.int64)
        for index, part in enumerate(parts):
            for term, count in part.items():
                assert isinstance(count, sympy.Integer), f"{sizes[index]} is no number of bytes"
                self.rows[index, column[term]] = int(count)

    def terms_at(self, values: Values) -> np.ndarray:
        """Evaluate the terms at given values: int64, a vector."""
        return np.array(self._terms_at(values), dtype=np.int64)

    def at(self, values: Values) -> list[int]:
        """Evaluate every expression."""
        return (self.rows @ self.terms_at(values)).tolist()

    def expression(self, row: np.ndarray) -> sympy.Expr:
        """Convert a row back to an expression."""
        return sympy.Add(*(int(count) * term for count, term in zip(row, self.terms) if count))


def compiled(
    expressions: Sequence[sympy.Basic], symbols: Sequence[sympy.Symbol]
) -> Callable[[Values], tuple[int | float | bool, ...]]:
    """Compile expressions to a function of the symbols' values, in Python's own integers and floats."""
    printer = PythonPrinter()
    names = {symbol: sympy.Symbol(f"v{index}", integer=True) for index, symbol in enumerate(symbols)}
    parts = [printer.doprint(expression.xreplace(names)) for expression in expressions]
    arguments = ", ".join(map(str, names.values()))
    source = f"def evaluate({arguments}):\n    return ({''.join(f'{part}, ' for part in parts)})\n"
    namespace: dict[str, Callable[..., tuple]] = {}
    exec(compile(source, "<sizes>", "exec"), {"torch": _FLOATS, "math": math}, namespace)
    evaluate = namespace["evaluate"]
    return lambda values: evaluate(*(values[symbol] for symbol in symbols))


class _Floats:
    """Replacement for `torch` in printed code: converts plain numbers without torch."""

    @staticmethod
    def sym_float(value: int) -> float:
        return float(value)


_FLOATS = _Floats()
