"""In what form optimizers keep states for parameters: said here, maybe before any session exists.

The registry holds parameters weakly, and is the only state of this kind beside those in `chunkc.session.session`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from chunkc.ir.states import DEFAULT_STATES, StateFormat

if TYPE_CHECKING:
    from chunkc.session.in_backward import Starter

_states: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class InBackward(Protocol):
    """What an optimizer does in backwards."""

    @property
    def starter(self) -> Starter | None:
        """By whom a session's graphs begin its updates; None: they do not."""


class StateKeeper(Protocol):
    """An optimizer whose states of a parameter move with it."""

    @property
    def in_backward(self) -> InBackward: ...

    def kept_states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """A parameter's states, to be replaced by the same elsewhere; empty where there are none yet."""


class Declared(NamedTuple):
    """What an optimizer said of a parameter: in what form it keeps states, in how many stages it updates, and who it is
    (None: nobody who keeps any yet)."""

    states: StateFormat
    num_stages: int
    keeper: weakref.ref[StateKeeper] | None


def declare_states(
    parameters: Iterable[torch.Tensor],
    states: StateFormat | None,
    num_stages: int = 1,
    keeper: weakref.ref[StateKeeper] | None = None,
) -> None:
    """Say in what form an optimizer keeps states for parameters: layouts made from now on reckon with it.

    The latest counts; None: no optimizer does. Layouts made before follow with `Session.restate`.
    """
    for parameter in parameters:
        if states is None:
            _states.pop(parameter, None)
        else:
            _states[parameter] = Declared(states.seen_by(parameter.dtype), num_stages, keeper)


def declared(parameter: torch.Tensor) -> Declared | None:
    """What `declare_states` said of a parameter."""
    return _states.get(parameter)


def declared_states(parameter: torch.Tensor) -> StateFormat | None:
    """The form of states that `declare_states` said of a parameter."""
    found = declared(parameter)
    return None if found is None else found.states


def state_format_of(parameter: torch.Tensor) -> StateFormat:
    """The form of a parameter's states: what was declared, else the default."""
    return declared_states(parameter) or DEFAULT_STATES
