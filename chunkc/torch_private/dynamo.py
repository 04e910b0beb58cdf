"""Dynamo: what it compiles, its marks and errors, and where it stands on Python's stack."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._dynamo import compiled_autograd, config, convert_frame, eval_frame
from torch._dynamo.eval_frame import OptimizedModule, remove_from_cache
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

__all__ = [
    "CONVERTS_FRAMES",
    "EVALUATES_FRAMES",
    "BackendCompilerFailed",
    "OptimizedModule",
    "TorchDynamoException",
    "remove_from_cache",
]

CONVERTS_FRAMES = convert_frame.__file__
"""The file of the code that compiles a frame: the innermost frames of a backend's stack lie above it."""

EVALUATES_FRAMES = eval_frame.__file__
"""The file of what `torch.compile` returns."""

_MARKS = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")


def patched(**options: Any) -> AbstractContextManager[Any]:
    """Dynamo's options inside."""
    return config.patch(**options)


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs, or lets a backend compile, a backward now."""
    return compiled_autograd.in_compiled_autograd_region


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module that `torch.compile` was given, or the module itself."""
    return model._orig_mod if isinstance(model, OptimizedModule) else model


def is_marked_dynamic(tensor: torch.Tensor) -> bool:
    """Whether `mark_dynamic` or `maybe_mark_dynamic` marked one of its dimensions."""
    return any(getattr(tensor, mark, None) for mark in _MARKS)


def mark_alike(tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Mark the same dimensions as dynamic."""
    for dim in getattr(like, "_dynamo_dynamic_indices", ()):
        torch._dynamo.mark_dynamic(tensor, dim)
    for dim in getattr(like, "_dynamo_weak_dynamic_indices", ()):
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def source_name(node: fx.Node) -> str:
    """How the frame reaches an input of Dynamo's graph, such as "L['self']._modules['up']"; "" where it is not known.

    Of some sources it is a method, of others an attribute.
    """
    name = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
    return name() if callable(name) else name
