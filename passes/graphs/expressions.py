"""Many expressions in a few symbols, evaluated at once.

Bytes are sums of products, so that each is a row of whole numbers over terms that many share (`s0`, `s0*s1`,
`s0*(s1//64)`): evaluating is a handful of terms and one product of a matrix and a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import sympy

from chunkc.passes.graphs.symbols import Size
from chunkc.torch_private.sizes import PythonPrinter

Values = Mapping[sympy.Symbol, int]
"""What every symbol stands for."""


class Expressions:
    """Sizes as rows over common terms.

    Attributes:
        terms: products of symbols, or whatever else is no sum.
        rows: int64, one per expression, one column per term: how often each term counts.
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
        """The terms at given values: int64, a vector."""
        return np.array(self._terms_at(values), dtype=np.int64)

    def at(self, values: Values) -> list[int]:
        """Every expression's value."""
        return (self.rows @ self.terms_at(values)).tolist()

    def expression(self, row: np.ndarray) -> sympy.Expr:
        """A row as an expression again."""
        return sympy.Add(*(int(count) * term for count, term in zip(row, self.terms) if count))


def compiled(
    expressions: Sequence[sympy.Basic], symbols: Sequence[sympy.Symbol]
) -> Callable[[Values], tuple[int | float | bool, ...]]:
    """A function of the symbols' values that evaluates expressions, with Python's own whole numbers and floats."""
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
    """What the printer calls for a conversion: plain numbers need nothing of torch."""

    @staticmethod
    def sym_float(value: int) -> float:
        return float(value)


_FLOATS = _Floats()
