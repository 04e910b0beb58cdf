"""What stands in `.grad` for a gradient that an update in the backward has used up: it never got home.

It says that there was one, so that `step()` and `zero_grad()` find it, and has no bytes. Whoever reads or changes it is
told what to do, instead of finding nothing: code that clips gradients would then clip none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from chunkc.ir.errors import UnsupportedError
from chunkc.torch_private.fake import without_values


class UsedGradient(torch.Tensor):
    """A gradient's shape, dtype and device, without its values.

    Every operation on it raises UnsupportedError.
    """

    _name: str

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str) -> UsedGradient:
        made = without_values(cls, parameter)
        made._name = name
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise used_up(next(_names((args, kwargs)), "a parameter"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<the gradient of {self._name}, used up by an update in the backward>"


def _names(values: Any) -> Iterator[str]:
    """Whose gradients are among an operation's arguments."""
    if isinstance(values, UsedGradient):
        yield values._name
    elif isinstance(values, Mapping):
        yield from _names(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _names(value)


def used_up(name: str) -> UnsupportedError:
    """The error for whoever wants a gradient that was used up."""
    return UnsupportedError(
        f'the gradient of {name} was used up: with overlap="backward" the backward has updated {name} itself, and its '
        "gradient went nowhere. Call optimizer.step(), then optimizer.zero_grad() (set_to_none=True), before the next "
        'backward; to clip, unscale or read gradients, use overlap="none"'
    )


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient, if it has one whose values are there."""
    gradient = parameter.grad
    return None if isinstance(gradient, UsedGradient) else gradient
