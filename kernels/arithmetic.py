"""Trace a rule's arithmetic, a pure function of values, and print it in PyTorch, C++ and Triton.

A rule computes with `+ - * /`, comparisons and the functions of this module. Each operation is rounded by itself, in
the order in which the rule is written, by all three printers, so their bits are the same: C++ and Triton are compiled
without contraction to fused multiply-adds, and Triton divides and takes roots as IEEE 754 does. Rules of words, which
C++ and Triton alone compute, use `^` and `>>`, too: all operations are then those of unsigned 32-bit integers.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

Operand: TypeAlias = "Value | float"
Condition: TypeAlias = "Value | bool"


@dataclass(frozen=True, eq=False)
class Value:
    """Number or condition of a traced rule: an input by name, or an operation on other values and constants.

    Attributes:
        per_element: whether elements may differ; otherwise the value belongs to a group of parameters.
        is_set: of a scalar: whether it is not 0, where the code is for such groups only.
    """

    name: str
    operands: tuple[Operand, ...] = ()
    per_element: bool = False
    is_condition: bool = False
    is_set: bool | None = None

    def __add__(self, other: Operand) -> Value:
        return _operation("add", self, other)

    def __sub__(self, other: Operand) -> Value:
        return _operation("sub", self, other)

    def __mul__(self, other: Operand) -> Value:
        return _operation("mul", self, other)

    def __truediv__(self, other: Operand) -> Value:
        return _operation("div", self, other)

    def __xor__(self, other: Operand) -> Value:
        return _operation("xor", self, other)

    def __rshift__(self, other: Operand) -> Value:
        return _operation("rshift", self, other)

    def __lt__(self, other: Operand) -> Value:
        return _operation("lt", self, other, is_condition=True)

    def __gt__(self, other: Operand) -> Value:
        return _operation("gt", self, other, is_condition=True)


def _operation(name: str, *operands: Operand, is_condition: bool = False) -> Value:
    per_element = any(isinstance(operand, Value) and operand.per_element for operand in operands)
    return Value(name, operands, per_element, is_condition)


def sqrt(value: Value) -> Value:
    """Compute the square root, rounded to nearest."""
    return _operation("sqrt", value)


def maximum(value: Value, other: Value) -> Value:
    """Choose the larger value; NaN if either is."""
    return _operation("maximum", value, other)


def is_set(scalar: Value) -> Condition:
    """Whether a scalar is not 0; known while the rule is traced where the code is for such groups only."""
    return _operation("ne", scalar, 0.0, is_condition=True) if scalar.is_set is None else scalar.is_set


def where(condition: Condition, value: Operand, other: Operand) -> Any:
    """Choose by a condition."""
    if isinstance(condition, bool):
        return value if condition else other
    return _operation("where", condition, value, other)


def sign(value: Value) -> Value:
    """Return 1, -1, or a zero or NaN as it is."""
    return where(value > 0.0, 1.0, where(value < 0.0, -1.0, value))


def lerp(start: Value, end: Value, weight: Value) -> Value:
    """Interpolate as `Tensor.lerp_`: from the nearer end, so that a weight of 1 gives `end` itself."""
    near = weight < 0.5
    return where(near, start, end) + where(near, weight, weight - 1.0) * (end - start)


class CppNumber(NamedTuple):
    """Type of a rule's values in C++, and the format of a constant of it."""

    type: str
    constant: str


FLOAT, DOUBLE, UINT32 = CppNumber("float", "{!r}f"), CppNumber("double", "{!r}"), CppNumber("uint32_t", "{!r}u")


class Code(NamedTuple):
    """Traced rule.

    Attributes:
        values: its operations, each after its operands; inputs are left out.
        results: the rule's results.
    """

    values: tuple[Value, ...]
    results: tuple[Value, ...]


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic of a rule.

    Attributes:
        function: takes a value for each of `inputs`, then the scalars by name, if there are any. Returns as many values
            as it has results. A result that is an input itself is not written (see `kept`).
        scalars: named tuple of the rule's scalars, each computed in double precision on the host, as `torch.optim`
            does. Kernels that compute in fp32 round them to it once, where `torch.optim` rounds them at every
            operation: the same value. A scalar `l2` is the weight decay that is added to the gradient; where it is 0,
            most code leaves the decay out. None: the rule has none.
    """

    function: Callable[..., tuple[Value, ...]]
    scalars: Any = None

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values of elements that the function takes."""
        names = tuple(inspect.signature(self.function).parameters)
        return names if self.scalars is None else names[:-1]

    @functools.cached_property
    def scalar_names(self) -> tuple[str, ...]:
        names: tuple[str, ...] = () if self.scalars is None else self.scalars._fields
        return names

    @functools.cached_property
    def kept(self) -> frozenset[str]:
        """Names of the inputs after the first that are their own results: the rule reads them alone."""
        pairs = zip(self.inputs[1:], self.code().results)
        return frozenset(name for name, result in pairs if result.name == name and not result.operands)

    @functools.cache  # noqa: B019
    def code(self, l2: bool | None = None) -> Code:
        """Trace the function. `l2`: whether the code is for groups with an `l2` other than 0; None: for all."""
        scalars = {name: Value(name, is_set=l2 if name == "l2" else None) for name in self.scalar_names}
        elements = [Value(name, per_element=True) for name in self.inputs]
        results = self.function(*elements, *([] if self.scalars is None else [SimpleNamespace(**scalars)]))
        return Code(tuple(_in_order(results)), results)

    def in_torch(self, inputs: Sequence[Tensor], scalars: Tensor, *, l2: bool) -> list[Tensor]:
        """Compute the results in PyTorch.

        Args:
            inputs: of one dtype.
            scalars: `[num_scalars]` of that dtype.
            l2: whether `scalars.l2` is not 0.
        """
        code = self.code(l2)
        named = dict(zip(self.inputs, inputs, strict=True)) | dict(
            zip(self.scalar_names, scalars.unbind(), strict=True)
        )
        computed: dict[Operand, Any] = {}

        def of(operand: Operand) -> Any:
            if not isinstance(operand, Value):
                return operand
            return computed[operand] if operand.operands else named[operand.name]

        for value in code.values:
            computed[value] = _TORCH[value.name](*map(of, value.operands))
        return [of(result) for result in code.results]

    def in_cpp(self, l2: bool | None, results: Sequence[str], number: CppNumber = FLOAT) -> tuple[str, str]:
        """Print C++: before the loop over elements, and in it.

        Inputs and scalars are numbers of their names; results become numbers of the names given.
        """
        code = self.code(l2)
        names = _names(code)
        of_groups = {value for value in code.values if not value.per_element}
        lines: dict[bool, list[str]] = {False: [], True: []}  # for a group, for an element
        for value in code.values:
            operands = [_operand(operand, names, number.constant) for operand in value.operands]
            pattern = _CPP[value.name]
            if value.name == "where" and value.per_element and value.operands[0] in of_groups:
                pattern = _CPP_CHOICE  # on the bits, since of a flag gcc makes no vector
            kind = "bool" if value.is_condition else number.type
            lines[value.per_element].append(f"const {kind} {names[value]} = {pattern.format(*operands)};")
            if value.is_condition and value in of_groups:
                lines[False].append(f"const uint32_t {names[value]}_bits = {names[value]} ? 0xFFFFFFFFu : 0u;")
        lines[True] += [
            f"const {number.type} {name} = {names[of]};" for name, of in zip(results, code.results, strict=True)
        ]
        return "\n".join(f"  {line}" for line in lines[False]), "\n".join(f"    {line}" for line in lines[True])

    @functools.cached_property
    def triton_source(self) -> str:
        """Source of the rule as a Triton function of its inputs and, where it has scalars, a pointer to them.

        Its name has a hash of its lines: Triton may cache a kernel by the names of the functions that it takes.
        """
        code = self.code()
        names = _names(code)
        used = set(names.values())
        lines = [
            f"    {name} = tl.load(scalars + {index})" for index, name in enumerate(self.scalar_names) if name in used
        ]
        for value in code.values:
            operands = [_operand(operand, names, "{!r}") for operand in value.operands]
            lines.append(f"    {names[value]} = {_TRITON[value.name].format(*operands)}")
        lines.append(f"    return {', '.join(names[result] for result in code.results)}")
        arguments = ", ".join([*self.inputs, *(["scalars"] if self.scalar_names else [])])
        body = f"({arguments}):\n" + "\n".join(lines) + "\n"
        digest = hashlib.sha256(body.encode()).hexdigest()[:12]
        return f"def {self.function.__name__}_{digest}{body}"

    @functools.cached_property
    def in_triton(self) -> Any:
        """The rule as a Triton function. Imports Triton."""
        import triton
        import triton.language as tl

        # Triton reads the source that `inspect` finds: that of a module without a file is in `linecache`.
        source = self.triton_source
        name = source[len("def ") : source.index("(")]
        module = ModuleType(f"{__name__}.{name}")
        file = f"<{module.__name__}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        module.__dict__["tl"] = tl
        exec(compile(source, file, "exec"), module.__dict__)
        return triton.jit(module.__dict__[name])


def _exact_root(values: Tensor) -> Tensor:
    """Compute square roots to nearest; torch's on the CPU, MKL's, are not always. Roots of fp32 are taken in fp64."""
    if values.dtype == torch.float64 and values.is_cpu:
        return torch.from_numpy(np.sqrt(values.numpy()))
    return values.to(torch.float64).sqrt().to(values.dtype)


_TORCH: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "lt": operator.lt,
    "gt": operator.gt,
    "ne": operator.ne,
    "sqrt": _exact_root,
    "maximum": torch.maximum,
    "where": torch.where,
}

_INFIX = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "xor": "{} ^ {}",
    "rshift": "{} >> {}",
    "lt": "{} < {}",
    "gt": "{} > {}",
    "ne": "{} != {}",
}

_CPP = _INFIX | {
    "div": "{} / {}",
    "sqrt": "std::sqrt({})",
    "maximum": "{0} >= {1} || {0} != {0} ? {0} : {1}",
    "where": "{} ? {} : {}",
}
_CPP_CHOICE = "chosen({0}_bits, {1}, {2})"

_TRITON = _INFIX | {
    "div": "tl.div_rn({}, {})",
    "sqrt": "tl.sqrt_rn({})",
    "maximum": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "where": "tl.where({}, {}, {})",
}


def _in_order(results: Sequence[Value]) -> Iterator[Value]:
    """Yield the operations that results need, each once, after its operands."""
    seen: set[Value] = set()

    def visit(value: Operand) -> Iterator[Value]:
        if isinstance(value, Value) and value.operands and value not in seen:
            seen.add(value)
            for operand in value.operands:
                yield from visit(operand)
            yield value

    for result in results:
        yield from visit(result)


def _names(code: Code) -> dict[Value, str]:
    """Name every value: inputs keep their names, operations are numbered."""
    names = {value: f"v{number}" for number, value in enumerate(code.values)}
    operands = [operand for value in code.values for operand in value.operands]
    inputs = [value for value in (*operands, *code.results) if isinstance(value, Value) and not value.operands]
    return names | {value: value.name for value in inputs}


def _operand(operand: Operand, names: Mapping[Value, str], constant: str) -> str:
    return names[operand] if isinstance(operand, Value) else constant.format(operand)
