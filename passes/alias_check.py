"""AOTAutograd's check of custom operators, and only of these: the first call of a graph takes what every call takes.

AOTAutograd runs a graph's first call in a dispatch mode that looks whether a custom operator returns memory it was
given. The mode sends every operator through Python, which holds what the operator is given, the tensor that PyTorch
makes of the `5` in `x + 5` too: bytes that no plan counts, and that no later call takes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch._functorch._aot_autograd import runtime_wrappers
from torch._library.utils import is_builtin
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

_MODE: type | None = getattr(runtime_wrappers, "_AnalyzeCustomOpInputOutputMode", None)
"""None where this PyTorch has no such check."""


def outside_alias_check() -> AbstractContextManager[Any]:
    """Leaves AOTAutograd's mode where it is the innermost one."""
    if _MODE is not None and isinstance(_get_current_dispatch_mode(), _MODE):
        return _pop_mode_temporarily()
    return nullcontext()


def is_custom(node: fx.Node) -> bool:
    """Whether a node runs an operator that the check is about."""
    return isinstance(node.target, torch._ops.OpOverload) and not is_builtin(node.target)


class CheckedOnce:
    """A callable that is checked the first time."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._is_first = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_first and _MODE is not None and getattr(config, "check_custom_op_aliasing", False):
            self._is_first = False
            with _MODE():
                return self._function(*args, **kwargs)
        return self._function(*args, **kwargs)
