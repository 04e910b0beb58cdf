"""What stands in `.grad` for a gradient whose values are not there: `gradient_of` finds none.

It says that there is one, so that `step()` and `zero_grad()` find it, and has no bytes. Whoever reads or changes it is
told what to do, instead of finding nothing: code that clips gradients would then clip none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from chunkc.ir.errors import UnsupportedError
from chunkc.torch_private.fake import without_values


class GradientElsewhere(torch.Tensor):
    """A gradient's shape, dtype and device, without its values.

    Every operation on it raises UnsupportedError.
    """

    _name: str

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str) -> GradientElsewhere:
        made = without_values(cls, parameter)
        made._name = name
        return made

    @abstractmethod
    def refusal(self) -> UnsupportedError:
        """The error for whoever wants it."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise next(_found((args, kwargs))).refusal()


class UsedGradient(GradientElsewhere):
    """Of a gradient that an update in the backward has used up: it never got home."""

    def refusal(self) -> UnsupportedError:
        return used_up(self._name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<the gradient of {self._name}, used up by an update in the backward>"


class LocalGradient(GradientElsewhere):
    """Of a gradient that ranks have not exchanged yet: each has what it has computed itself, whole."""

    def refusal(self) -> UnsupportedError:
        return UnsupportedError(
            f"ranks have not exchanged the gradient of {self._name} yet: inside `with optimizer.accumulating():` each "
            "adds up its own. Run the last backward of a step, which uses the same parameters, outside of it; before "
            "that, gradients can only be dropped, by zero_grad() (set_to_none=True)"
        )

    def full_tensor(self) -> torch.Tensor:
        """As a `DTensor` has it."""
        raise self.refusal()

    to_local = full_tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<the gradient of {self._name}, not exchanged between ranks yet>"


def _found(values: Any) -> Iterator[GradientElsewhere]:
    """Those among an operation's arguments."""
    if isinstance(values, GradientElsewhere):
        yield values
    elif isinstance(values, Mapping):
        yield from _found(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _found(value)


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
    return None if isinstance(gradient, GradientElsewhere) else gradient
