"""Says once for each model that an optimizer of `torch.optim` keeps its states outside of the plan."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from chunkc import session
from chunkc.ir.units import format_nbytes
from chunkc.logs import logger
from chunkc.optim.chunked_optimizer import ChunkedOptimizer

_hinted: weakref.WeakSet[session.Session] = weakref.WeakSet()
"""Models about which it was said."""


def install() -> None:
    """Look at every optimizer's steps from now on, by PyTorch's hook for that."""
    register_optimizer_step_post_hook(_hint)


def _hint(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or isinstance(optimizer, ChunkedOptimizer):
        return
    nbytes: dict[session.Session, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (hit := session.managing(parameter)) is not None and hit[0] not in _hinted:
                nbytes[hit[0]] = nbytes.get(hit[0], 0) + _state_nbytes(optimizer, parameter)
    for found, of_states in nbytes.items():
        if of_states:
            _hinted.add(found)
            _say(optimizer, of_states)


def _state_nbytes(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    state = optimizer.state.get(parameter, {})
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


def _say(optimizer: Optimizer, nbytes: int) -> None:
    name = type(optimizer).__name__
    known = name in ("Adam", "AdamW", "SGD") and type(optimizer).__module__.startswith("torch.")
    logger.warning(
        "%s.%s keeps %s of states on the compute device, outside of the memory budget; %s keeps them at home, within "
        "it",
        type(optimizer).__module__.removesuffix(f".{name.lower()}"),
        name,
        format_nbytes(nbytes),
        f"chunkc.optim.{name}" if known else "an optimizer of chunkc.optim",
    )
