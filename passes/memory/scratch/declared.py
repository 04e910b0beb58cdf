"""Operators that chunkc has never seen: what users declare that they take, else a guess.

Declarations are the one state of this subject.
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

_declared: dict[str, ScratchFunction] = {}  # one per process, as torch's operators are


def declare_scratch(name: str, function: ScratchFunction) -> None:
    """Say how many bytes the operator `name` ("namespace::op") allocates inside, beyond its outputs, while it runs.

    `function(args, kwargs, outputs, num_threads)` gets what the operator takes and returns, as fake tensors: only
    sizes, strides and dtypes may be read. It returns bytes; 0 is allowed. A later declaration replaces an earlier one,
    and a declaration goes before chunkc's own table. It takes effect for models that are compiled after it.

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


def declared_nbytes(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: object, num_threads: int
) -> int | None:
    """The bytes declared for `target`; None where nothing was.

    Raises:
        OptionsError: the declared function returned something else than a number of bytes.
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
    """Guess the scratch of an operator without a rule: its operands and results, each whole."""
    leaves = pytree.tree_leaves((args, kwargs, outputs))
    return [leaf.numel() * leaf.itemsize for leaf in leaves if isinstance(leaf, Tensor)]
