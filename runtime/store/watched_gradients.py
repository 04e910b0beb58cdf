"""Watch gradients for their first use by code outside of chunkc.

An update in the backward may be committed without a look at its gradients' memory if none was written since. A watched
gradient is an ordinary tensor, but of a class of its own: PyTorch passes every function and attribute of such a class
through `__torch_function__`. The first use gives the same object PyTorch's own class back, so that nothing but
`type(p.grad)` ever tells it from an ordinary gradient. What C code does with the memory of a tensor that was handed to
it is no use in this sense (see `checksums`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from chunkc.runtime.store.gradients import has_external_views
from chunkc.torch_private.engine import without_torch_function


class _WatchedGradient(torch.Tensor):
    """A gradient that nothing has used yet."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        _note_use(args)
        _note_use(kwargs)
        return function(*args, **(kwargs or {}))


def watch(gradient: torch.Tensor) -> None:
    """Watch a gradient from now on; one with external views, or of a class of the user, is not, and counts as used."""
    if type(gradient) is torch.Tensor and not has_external_views(gradient):
        gradient.__class__ = _WatchedGradient


def is_unused(gradient: torch.Tensor) -> bool:
    """Whether a gradient is watched, and nothing has used it since."""
    return type(gradient) is _WatchedGradient


@contextmanager
def unwatched() -> Iterator[None]:
    """Let chunkc's own code use watched gradients inside, which does not count. No code of the user runs inside."""
    with without_torch_function():
        yield


def _note_use(values: Any) -> None:
    """Give the watched gradients among a function's arguments their ordinary class."""
    if isinstance(values, _WatchedGradient):
        values.__class__ = torch.Tensor  # type: ignore[assignment]  # PyTorch does so, too (UninitializedParameter)
    elif isinstance(values, Mapping):
        _note_use(tuple(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            _note_use(value)
