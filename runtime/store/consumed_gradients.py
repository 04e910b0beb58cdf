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
from chunkc.torch_private.engine import is_zero_tensor
from chunkc.torch_private.fake import without_values


class GradientPlaceholder(torch.Tensor):
    """A gradient's shape, dtype and device, without its values.

    Every operation on it raises UnsupportedError.
    """

    _name: str

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str) -> GradientPlaceholder:
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


class ConsumedGradient(GradientPlaceholder):
    """Of a gradient that an update in the backward has used up: it never got home."""

    def refusal(self) -> UnsupportedError:
        return consumed_error(self._name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<the gradient of {self._name}, used up by an update in the backward>"


class LocalGradient(GradientPlaceholder):
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


def _found(values: Any) -> Iterator[GradientPlaceholder]:
    """Those among an operation's arguments."""
    if isinstance(values, GradientPlaceholder):
        yield values
    elif isinstance(values, Mapping):
        yield from _found(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _found(value)


def consumed_error(name: str) -> UnsupportedError:
    """The error for whoever wants a gradient that was used up."""
    return UnsupportedError(
        f'the gradient of {name} was used up: with overlap="backward" the backward has updated {name} itself, and its '
        "gradient went nowhere. Call optimizer.step(), then optimizer.zero_grad() (set_to_none=True), before the next "
        'backward; to clip, unscale or read gradients, use overlap="none"'
    )


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient, if it has one whose values are there; they are what its memory has, if it has any."""
    gradient = parameter.grad
    if gradient is None or isinstance(gradient, GradientPlaceholder):
        return None
    if is_zero_tensor(gradient) or gradient.is_neg():
        # Autograd makes such tensors: zeros without memory (of `sgn`), and memory of which the elements are the
        # negative. The tensor object stays, since others may have it.
        gradient.data = gradient.detach().clone().resolve_neg()
    return gradient


def without_memory(tensor: torch.Tensor) -> str | None:
    """Why a tensor's elements cannot be read through one pointer and strides, as the end of a sentence; None: they can.

    Of a gradient, ask after `gradient_of`.
    """
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}"
    if tensor.is_nested:
        return "is a nested tensor"
    if tensor.numel() == 0 or tensor.data_ptr() != 0:
        return None
    if tensor.is_meta:
        return "is on the meta device, without values"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(tensor).__name__}, whose values are in other tensors"
    return "has no memory (it stands for zeros, or its storage was freed)"


def refuse_without_memory(gradients: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse gradients that cannot be copied home.

    Args:
        gradients: by the names of their parameters.

    Raises:
        UnsupportedError: there is one.
    """
    for name, gradient in gradients.items():
        if gradient is not None and (reason := without_memory(gradient)) is not None:
            raise UnsupportedError(
                f"the gradient of {name} {reason}, and cannot be kept in a chunk: assign a dense tensor as its .grad"
            )
