"""Keep the scratch that users declare for operators; guess that of operators without a declaration or a rule.

Declarations are kept per process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from chunkc.ir.errors import OptionsError

ScratchFunction = Callable[[Sequence[Any], Mapping[str, Any], Any, int], int]
"""(args, kwargs, outputs, num_threads) -> bytes."""

_declared: dict[str, ScratchFunction] = {}  # per process, as torch's operators are registered


def declare_scratch(name: str, function: ScratchFunction) -> None:
    """Declare the bytes that the operator `name` ("namespace::op") allocates while it runs, beyond its outputs.

    `function(args, kwargs, outputs, num_threads)` gets what the operator takes and returns, with fake tensors: it may
    read only sizes, strides and dtypes. It returns bytes, 0 or more. A later declaration replaces an earlier one, and a
    declaration overrides chunkc's own table. It takes effect for models that are compiled after it.

    Raises:
        OptionsError: `name` is not of the form "namespace::op", or `function` cannot be called.
    """
    if not isinstance(name, str) or name.count("::") != 1 or not all(name.split("::")):
        raise OptionsError(f'declare_scratch takes an operator\'s name such as "my_library::my_operator", not {name!r}')
    if not callable(function):
        raise OptionsError(
            "declare_scratch takes a function of (args, kwargs, outputs, num_threads) that returns bytes, "
            f"not {function!r}"
        )
    _declared[name] = function


def is_declared(target: torch._ops.OpOverload) -> bool:
    """Whether the user declared the scratch of `target`."""
    return target._schema.name in _declared


def any_declared() -> bool:
    """Whether the user declared the scratch of any operator."""
    return bool(_declared)


def declared_nbytes(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: object, num_threads: int
) -> int | None:
    """Return the bytes declared for this call of `target`; None without a declaration.

    Raises:
        OptionsError: the declared function returned no integer, or a negative one.
    """
    function = _declared.get(target._schema.name)
    if function is None:
        return None
    nbytes = function(args, kwargs, outputs, num_threads)
    if not isinstance(nbytes, int | torch.SymInt) or isinstance(nbytes, bool) or nbytes < 0:
        raise OptionsError(
            f"the function declared for {target._schema.name} returned {nbytes!r}; it must return bytes, 0 or more"
        )
    return nbytes


def guessed_nbytes(args: Sequence[Any], kwargs: Mapping[str, Any], outputs: object) -> list[int]:
    """Guess the scratch of an operator without a rule: the bytes of each operand and result."""
    leaves = pytree.tree_leaves((args, kwargs, outputs))
    return [leaf.numel() * leaf.itemsize for leaf in leaves if isinstance(leaf, Tensor)]
