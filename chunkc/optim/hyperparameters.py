"""Hyper-parameters as a user gives them, as plain numbers and flags; whatever is none is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from chunkc.ir.errors import OptionsError
from chunkc.ir.text import short


def number(group: Mapping[str, Any], name: str) -> float:
    """A number of a parameter group: a real number, or a tensor of one element with a real dtype.

    Raises:
        OptionsError: the group has none of that name, or something else.
    """
    if name not in group:
        raise OptionsError(f"a parameter group lacks {name}")
    return plain(group[name], name)


def pair(group: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Two numbers of a parameter group.

    Raises:
        OptionsError: the group has none of that name, or something else.
    """
    if name not in group:
        raise OptionsError(f"a parameter group lacks {name}")
    value = group[name]
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise OptionsError(f"{name} is {shown(value)}; allowed: two numbers")
    return plain(value[0], f"{name}[0]"), plain(value[1], f"{name}[1]")


def flag(group: Mapping[str, Any], name: str) -> bool:
    """A flag of a parameter group; False where the group has none of that name.

    Raises:
        OptionsError: it is not a bool.
    """
    value = group.get(name, False)
    if not isinstance(value, bool):
        raise OptionsError(f"{name} is {shown(value)}; allowed: True or False")
    return value


def plain(value: object, name: str) -> float:
    """A real number, or a tensor of one, as a float.

    Raises:
        OptionsError: it is something else.
    """
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and value.device.type != "meta"
        is_number = is_number and value.dtype != torch.bool and not value.dtype.is_complex
    else:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise OptionsError(f"{name} is {shown(value)}; allowed: a number, or a tensor of one")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        raise OptionsError(f"{name} is {shown(value)}; allowed: a number that a float can have") from None


def shown(value: object) -> str:
    """A value on one short line, with its type."""
    return f"{short(value)} ({type(value).__name__})"
