"""Functions of `torch._C` and private attributes of tensors: autograd's engine, autocast, storages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._logging import trace_structured
from torch.autograd.function import _HookMixin
from torch.autograd.graph import Node

__all__ = ["KEEPS_TANGENTS"]

KEEPS_TANGENTS = not hasattr(torch.autograd.Function, "boxed_grads_call")
"""Whether the caller of a compiled backward keeps the gradients that it passes until the backward returns. AOTAutograd
does up to PyTorch 2.12; from 2.13 on it gets them from autograd in a list, which it empties."""


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add an artifact, which tlparse shows, to the trace of `TORCH_TRACE`; without a trace, `text` is not called."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )


def without_autocast() -> AbstractContextManager[Any]:
    """Disable autocast inside the block, for all devices."""
    return torch._C._DisableAutocast()


def without_torch_function() -> AbstractContextManager[Any]:
    """Let functions and attributes of tensors ignore `__torch_function__` of their classes inside the block."""
    return torch._C.DisableTorchFunctionSubclass()


def current_graph_task() -> int:
    """Return the id of the backward that this thread runs now; -1 if it runs none."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the backward that this thread runs now keeps its graph (`retain_graph=True`)."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def has_saved_tensor_hooks() -> bool:
    """Whether hooks get what this thread saves for a backward now (`torch.autograd.graph.saved_tensors_hooks`)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def current_node() -> Node | None:
    """Return the autograd node that this thread executes now; None if it executes none."""
    return torch._C._current_autograd_node()


def will_execute(node: Node) -> bool:
    """Whether the backward that runs now will execute a node.

    Raises:
        RuntimeError: the node accumulates into a leaf, and `torch.autograd.grad` runs.
    """
    return torch._C._will_engine_execute_node(node)


def leaf_at(node: Node | None) -> Any:
    """Return the leaf that a node accumulates into; None for another kind of node."""
    return getattr(node, "variable", None)


def latest_node_hook() -> object:
    """Return an object that is replaced whenever code outside of chunkc registers a hook on an autograd node."""
    return _latest_node_hook


def _note_node_hook(backward_hooks: Any, hook: Any) -> Any:
    global _latest_node_hook
    if not str(getattr(hook, "__module__", None)).startswith("chunkc."):
        _latest_node_hook = object()
    return _register_node_hook(backward_hooks, hook)


_latest_node_hook = object()
_register_node_hook = _HookMixin._register_hook
_HookMixin._register_hook = staticmethod(_note_node_hook)  # type: ignore[method-assign]  # called for every node's hook


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Count the references to a storage: each tensor on it holds one, and so does the Python object passed here."""
    return torch._C._storage_Use_Count(storage._cdata)


def tensor_use_count(tensor: torch.Tensor) -> int:
    """Count the C++ references to a tensor; its Python object holds one."""
    return tensor._use_count()  # type: ignore[attr-defined]


def hooks_of(tensor: torch.Tensor) -> Mapping[int, Any] | None:
    """Return the hooks that `Tensor.register_hook` registered; None or empty if there are none."""
    return tensor._backward_hooks


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a batch of tensors, in `torch.vmap` or under `is_grads_batched=True`."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor) or torch._C._functorch.is_batchedtensor(tensor)


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor represents zeros without memory; autograd makes such ones (the gradient of `sgn`)."""
    return tensor._is_zerotensor()
