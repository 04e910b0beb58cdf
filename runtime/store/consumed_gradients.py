"""Put placeholders into `.grad` for gradients without values; `gradient_of` returns None for them.

A placeholder makes `step()` and `zero_grad()` find a gradient, and has no bytes. Any operation on it raises and says
what to do: with None in its place, code that clips gradients would clip none.
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
    """Shape, dtype and device of a gradient, without its values. Every operation on it raises UnsupportedError."""

    _name: str

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str) -> GradientPlaceholder:
        placeholder = without_values(cls, parameter)
        placeholder._name = name
        return placeholder

    @abstractmethod
    def refusal(self) -> UnsupportedError:
        """Make the error of operations on it."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise next(_placeholders((args, kwargs))).refusal()


class ConsumedGradient(GradientPlaceholder):
    """Placeholder of a gradient that an update in the backward has consumed: it never got home."""

    def refusal(self) -> UnsupportedError:
        return consumed_error(self._name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<the gradient of {self._name}, consumed by an update in the backward>"


class LocalGradient(GradientPlaceholder):
    """Placeholder of a gradient that ranks have not exchanged yet: each rank has computed its own, unsharded."""

    def refusal(self) -> UnsupportedError:
        return UnsupportedError(
            f"ranks have not exchanged the gradient of {self._name} yet: inside `with optimizer.accumulating():` each "
            "adds up its own. Run the last backward of a step, which uses the same parameters, outside of it; before "
            "that, gradients can only be dropped, by zero_grad() (set_to_none=True)"
        )

    def full_tensor(self) -> torch.Tensor:
        """Raise: the method of a `DTensor`."""
        raise self.refusal()

    to_local = full_tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<the gradient of {self._name}, not exchanged between ranks yet>"


def _placeholders(values: Any) -> Iterator[GradientPlaceholder]:
    """Iterate over the placeholders among an operation's arguments."""
    if isinstance(values, GradientPlaceholder):
        yield values
    elif isinstance(values, Mapping):
        yield from _placeholders(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _placeholders(value)


def consumed_error(name: str) -> UnsupportedError:
    """Make the error of operations on a consumed gradient."""
    return UnsupportedError(
        f'the gradient of {name} was consumed: with overlap="backward" the backward has updated {name} itself and not '
        "kept the gradient. Call optimizer.step(), before any states are loaded, then optimizer.zero_grad() "
        '(set_to_none=True), before the next backward; to clip, unscale or read gradients, use overlap="none"'
    )


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient; None if it has none, or a placeholder.

    The values are materialised in the gradient's memory, unless it can have none (see `without_memory`).
    """
    gradient = parameter.grad
    if gradient is None or isinstance(gradient, GradientPlaceholder):
        return None
    if is_zero_tensor(gradient) or gradient.is_neg():
        # Autograd makes such tensors: zeros without memory (of `sgn`), and memory of which the elements are the
        # negative. The tensor object stays, since user code may have references to it.
        gradient.data = gradient.detach().clone().resolve_neg()
    return gradient


def without_memory(tensor: torch.Tensor) -> str | None:
    """Say, as the end of a sentence, why a tensor's elements cannot be read by pointer and strides; None: they can.

    For gradients: call it on the result of `gradient_of`.
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
        return f"is a {type(tensor).__name__}, which has its values in other tensors"
    return "has no memory (it stands for zeros, or its storage was freed)"


def refuse_without_memory(gradients: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse gradients that cannot be copied home.

    Args:
        gradients: by the names of their parameters.

    Raises:
        UnsupportedError: a gradient cannot be copied home.
    """
    for name, gradient in gradients.items():
        if gradient is not None and (reason := without_memory(gradient)) is not None:
            raise UnsupportedError(
                f"the gradient of {name} {reason}, and cannot be kept in a chunk: assign a dense tensor as its .grad"
            )
