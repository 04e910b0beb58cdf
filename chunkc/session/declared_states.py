"""Declare in which format optimizers keep the states of parameters, possibly before any session exists.

The registry holds parameters weakly, and is the only state of this kind besides that of `chunkc.session.session`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from chunkc.ir.states import DEFAULT_STATES, StateFormat
from chunkc.session.protocols import StateKeeper

_states: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Declared(NamedTuple):
    """An optimizer's declaration for a parameter.

    Attributes:
        states: the format of the states.
        num_stages: the stages of an update.
        keeper: the optimizer; None: the declaration has no optimizer that keeps states yet.
    """

    states: StateFormat
    num_stages: int
    keeper: weakref.ref[StateKeeper] | None


def declare_states(
    parameters: Iterable[torch.Tensor],
    states: StateFormat | None,
    num_stages: int = 1,
    keeper: weakref.ref[StateKeeper] | None = None,
) -> None:
    """Declare the format in which an optimizer keeps states for parameters; layouts made from now on have room for it.

    The latest declaration counts; None withdraws it. Existing layouts follow with `Session.restate`.
    """
    for parameter in parameters:
        if states is None:
            _states.pop(parameter, None)
        else:
            _states[parameter] = Declared(states.seen_by(parameter.dtype), num_stages, keeper)


def declared(parameter: torch.Tensor) -> Declared | None:
    """Return the latest declaration for a parameter."""
    return _states.get(parameter)


def keeper_of(parameter: torch.Tensor | None) -> StateKeeper | None:
    """Return the optimizer that has declared states of a parameter, while it lives."""
    declaration = None if parameter is None else declared(parameter)
    return None if declaration is None or declaration.keeper is None else declaration.keeper()


def declared_states(parameter: torch.Tensor) -> StateFormat | None:
    """Return the declared format of a parameter's states."""
    declaration = declared(parameter)
    return None if declaration is None else declaration.states


def stages_of_updates(parameters: Iterable[torch.Tensor]) -> int:
    """Return the most stages of an update that optimizers have declared for parameters; 1 without declarations."""
    return max((found.num_stages for parameter in parameters if (found := declared(parameter))), default=1)


def state_format_of(parameter: torch.Tensor) -> StateFormat:
    """Return the format of a parameter's states: the declared one, else the default."""
    return declared_states(parameter) or DEFAULT_STATES
