"""Reads the source of a wrapper that Inductor generated, and makes of its `call` a function that can be replayed.

The form of a wrapper, and of what it says about symbols (`s27 = arg1_1_size[0]`, `u0 = buf0.item()`), is that of
`torch/_inductor/codegen/wrapper.py` in PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from chunkc.ir.errors import UnsupportedError

DATA_DEPENDENT = re.compile(r"u\d+")
"""Names of symbols whose values are read from data: numbers inside tensors, sizes of `nonzero`'s results."""

BIND = "__bind_data_dependent"
"""The replay calls this with a symbol's name and what the wrapper assigns to it, or None for a tensor's element."""

_BUILTINS = frozenset({"None", "True", "False", "bool", "range", "len", "abs"})


@dataclass(frozen=True)
class Wrapper:
    """The parts of a wrapper that its memory depends on.

    Attributes:
        function: its `call`, which takes the list of inputs.
        kernels: names of the compiled kernels.
    """

    function: ast.FunctionDef
    kernels: tuple[str, ...]

    @classmethod
    def parse(cls, source: str) -> Wrapper:
        """Raises:
        UnsupportedError: there is no `call`.
        """
        module = ast.parse(source)
        function = _Symbols().visit(_call_function(module))
        return cls(ast.fix_missing_locations(function), tuple(_assigned_by_async_compile(module)))

    @property
    def call_source(self) -> str:
        return ast.unparse(self.function)

    def call(self, namespace: dict[str, Any]) -> Callable[[list[Any]], Any]:
        """The function, with the names of `namespace` around it.

        Raises:
            UnsupportedError: it reads a name that nobody has said anything about.
        """
        _refuse_unknown_names(self.function, namespace)
        exec(compile(ast.Module([self.function], []), "<inductor wrapper>", "exec"), namespace)
        return namespace["call"]


class _Symbols(ast.NodeTransformer):
    """Names the symbols that come from data, and leaves out what only checks values."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = node.targets[0]
        if isinstance(target, ast.Name) and DATA_DEPENDENT.fullmatch(target.id.removesuffix("_undivided")):
            reads_element = any(isinstance(n, ast.Attribute) and n.attr == "item" for n in ast.walk(node.value))
            value = ast.Constant(None) if reads_element else node.value
            arguments: list[ast.expr] = [ast.Constant(target.id), value]
            node.value = ast.Call(ast.Name(BIND, ast.Load()), arguments, [])
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        only_checks = not node.orelse and all(isinstance(line, ast.Raise) for line in node.body)
        return ast.Pass() if only_checks else self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.Pass()


def sizes_namespace() -> dict[str, Any]:
    """What wrappers compute sizes with, so that symbols go through unharmed."""
    return {
        "math": math,
        "inf": float("inf"),
        "nan": float("nan"),
        "int": torch.sym_int,
        "float": torch.sym_float,
        "max": lambda *sizes: functools.reduce(torch.sym_max, sizes),
        "min": lambda *sizes: functools.reduce(torch.sym_min, sizes),
    }


def _call_function(module: ast.Module) -> ast.FunctionDef:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            node.args.args = [arg for arg in node.args.args if arg.arg != "self"]
            return node
    raise UnsupportedError("Inductor generated a wrapper without a `call` function")


def _assigned_by_async_compile(module: ast.Module) -> list[str]:
    names = []
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = node.value.func
            owner = called.value if isinstance(called, ast.Attribute) else None
            if isinstance(owner, ast.Name) and owner.id == "async_compile":
                names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return names


def _refuse_unknown_names(function: ast.FunctionDef, known: Mapping[str, Any]) -> None:
    bound = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {arg.arg for arg in function.args.args}
    read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    unknown = sorted(read - bound - set(known) - _BUILTINS)
    if unknown:
        raise UnsupportedError(
            f"Inductor's wrapper uses {', '.join(unknown)}, whose memory chunkc does not know; "
            'compile with options={"codegen": "eager"}'
        )
