"""PyTorch's own parts of sympy expressions, which symbolic sizes are made of."""

from __future__ import annotations

import sympy
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.symbol import SymT, symbol_is_type

__all__ = ["PythonPrinter", "depends_on_data", "int_oo"]


def depends_on_data(expression: sympy.Expr) -> bool:
    """Whether a size contains an unbacked symbol: a number that is read from a tensor."""
    return any(symbol_is_type(symbol, SymT.UNBACKED_INT) for symbol in expression.free_symbols)
