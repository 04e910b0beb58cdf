"""Reads the source of a wrapper that Inductor generated, and makes of its `call` a function that can be replayed.

The form of a wrapper, and of what it says about sizes (`s27 = arg1_1_size[0]`, `u0 = buf0.item()`), is that of
`torch/_inductor/codegen/wrapper.py` in the versions of PyTorch that chunkc was checked on.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

DATA = "__read_from_data"
"""The replay calls this for a number that a wrapper reads out of a tensor."""

AT = "_chunkc_at"
"""The replay calls this before every statement, with the position of the operation that the statement is."""

_BUILTINS = frozenset({"None", "True", "False", "bool", "range", "len", "abs"})


class UnreadableWrapper(Exception):
    """A wrapper does something that this reader does not know. The text says what, for `unread_wrapper`."""


@dataclass(frozen=True)
class ParsedWrapper:
    """The parts of a wrapper that its memory depends on.

    Attributes:
        function: its `call`, which takes the list of inputs.
        kernels: names of the compiled kernels.
    """

    function: ast.FunctionDef
    kernels: tuple[str, ...]

    @classmethod
    def parse(cls, source: str, made_by: Mapping[str, int] = MappingProxyType({})) -> ParsedWrapper:
        """`made_by`: names of buffers -> the positions of the operations that make them.

        Raises:
            UnreadableWrapper: there is no `call`.
        """
        module = ast.parse(source)
        function = _Symbols().visit(_call_function(module))
        _mark_positions(function, made_by)
        kernels = tuple(_kernels(module))
        return cls(ast.fix_missing_locations(function), kernels)

    @property
    def call_source(self) -> str:
        return ast.unparse(self.function)

    def call(self, namespace: dict[str, Any]) -> Callable[[list[Any]], Any]:
        """Compile the function, with `namespace` as its globals, and return it.

        Raises:
            UnreadableWrapper: it reads an unknown name.
        """
        _refuse_unknown_names(self.function, namespace)
        exec(compile(ast.Module([self.function], []), "<inductor wrapper>", "exec"), namespace)
        return namespace["call"]


class _Symbols(ast.NodeTransformer):
    """Puts `DATA` where numbers are read out of tensors, and leaves out what only checks values."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if any(isinstance(part, ast.Attribute) and part.attr == "item" for part in ast.walk(node.value)):
            node.value = ast.Call(ast.Name(DATA, ast.Load()), [], [])
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        only_checks = not node.orelse and all(isinstance(line, ast.Raise) for line in node.body)
        return ast.Pass() if only_checks else self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.Pass()


def sizes_namespace() -> dict[str, Any]:
    """Return functions by name, as wrappers compute sizes with them, that keep symbols."""
    return {
        "math": math,
        "inf": float("inf"),
        "nan": float("nan"),
        "int": torch.sym_int,
        "float": torch.sym_float,
        "max": lambda *sizes: functools.reduce(torch.sym_max, sizes),
        "min": lambda *sizes: functools.reduce(torch.sym_min, sizes),
    }


def _mark_positions(function: ast.FunctionDef, made_by: Mapping[str, int]) -> None:
    """Put `_chunkc_at(position)` before every statement that calls something, with its operation's position.

    What a statement makes is computed from the buffers it reads, so its operation is the last of all that are named.
    """
    for block in [node.body for node in ast.walk(function) if isinstance(node, ast.FunctionDef | ast.With)]:
        marked: list[ast.stmt] = []
        for statement in block:
            inside = list(ast.walk(statement))
            if any(isinstance(node, ast.Call) for node in inside) and not isinstance(statement, ast.With):
                names = [node.id for node in inside if isinstance(node, ast.Name)]
                position = max((made_by[name] for name in names if name in made_by), default=None)
                marked.append(ast.parse(f"{AT}({position})").body[0])
            marked.append(statement)
        block[:] = marked


def _call_function(module: ast.Module) -> ast.FunctionDef:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            node.args.args = [arg for arg in node.args.args if arg.arg != "self"]
            return node
    raise UnreadableWrapper("has no function `call`")


def _kernels(module: ast.Module) -> Iterator[str]:
    """Yield the names of the kernels that a wrapper compiles."""
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = node.value.func
            if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name):
                continue
            if called.value.id == "async_compile":
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        yield target.id


def _refuse_unknown_names(function: ast.FunctionDef, known: Mapping[str, Any]) -> None:
    bound = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {arg.arg for arg in function.args.args}
    read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    unknown = sorted(read - bound - set(known) - _BUILTINS)
    if unknown:
        raise UnreadableWrapper(f"uses {', '.join(unknown)}")
