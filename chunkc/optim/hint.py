"""Warn once for each model about data that its optimizer updates outside of the plan.

These are states of an optimizer of `torch.optim`, and parameters, some or all, that no compiled graph has taken."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from chunkc.ir.units import format_nbytes
from chunkc.optim.optimizer import ChunkedOptimizer
from chunkc.session import session
from chunkc.session.logs import logger
from chunkc.torch_private.dynamo import ComptimeContext, comptime, traced_object, unwrapped
from chunkc.tracing.given_modules import GIVEN

_hinted: weakref.WeakSet[session.Session] = weakref.WeakSet()
"""Sessions for which the warning about states was logged."""

_searched: weakref.WeakSet[session.Session] = weakref.WeakSet()
"""Sessions that have had their first step."""

_asked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizers, and how many modules had been given when their modules were last looked at."""

_named: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules for which the warning that nothing is compiled was logged."""


def install() -> None:
    """Inspect every optimizer's steps from now on, by PyTorch's hook for that."""
    register_optimizer_step_post_hook(_hint)


def _hint(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        comptime(_inspect_traced)
    else:
        _inspect(optimizer)


def _inspect_traced(context: ComptimeContext) -> None:
    """Inspect an optimizer as Dynamo traces its step: gradients are there already, and no hook is going to run."""
    optimizer = traced_object(context, "optimizer")
    if optimizer is not None:
        _inspect(optimizer)


def _inspect(optimizer: Optimizer) -> None:
    _search(optimizer, _name_uncompiled(optimizer))
    if isinstance(optimizer, ChunkedOptimizer):
        return
    nbytes: dict[session.Session, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            managed_by, _ = session.managing(parameter) or (None, "")
            if managed_by is not None and managed_by not in _hinted:
                nbytes[managed_by] = nbytes.get(managed_by, 0) + _state_nbytes(optimizer, parameter)
    for managed_by, states_nbytes in nbytes.items():
        if states_nbytes:
            _hinted.add(managed_by)
            _warn_of_states(optimizer, states_nbytes)


def _search(optimizer: Optimizer, told: Collection[int]) -> None:
    """Warn of parameters that no compiled graph trains, in the first step of a model.

    Args:
        told: `id`s of parameters of which another warning was logged.
    """
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sessions = [owner for owner in session.sessions_of(every) if owner not in _searched]
    if not sessions:
        return
    _searched.update(sessions)
    unplanned = [p for p in every if p.grad is not None and not _is_trained(p) and id(p) not in told]
    if unplanned:
        names = {p: name for owner in sessions for m in owner.modules for name, p in unwrapped(m).named_parameters()}
        named = [names[p] for p in unplanned if p in names] or ["a parameter of another module"]
        logger.warning(
            "no compiled graph trains %s%s: %s of parameters are outside of the memory budget, and so are their "
            "gradients and states; TORCH_LOGS=graph_breaks names what Dynamo leaves to eager PyTorch",
            named[0],
            f" and {len(unplanned) - 1} more" if len(unplanned) > 1 else "",
            format_nbytes(sum(p.nbytes for p in unplanned)),
        )


def _name_uncompiled(optimizer: Optimizer) -> Collection[int]:
    """Warn of modules that `torch.compile` was given and of which no graph trains a parameter, in their first step.

    Returns:
        The `id`s of their parameters.
    """
    if _asked.get(optimizer) == GIVEN.num_notes:
        return ()
    trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    if not trained:
        return ()
    _asked[optimizer] = GIVEN.num_notes
    uncompiled: dict[nn.Module, dict[str, nn.Parameter]] = {}
    for module in GIVEN.with_parameters():
        parameters = {name: p for name, p in module.named_parameters() if id(p) in trained}
        if parameters and module not in _named and not any(map(_is_trained, module.parameters())):
            uncompiled[module] = parameters
    nbytes_of = {id(p): p.nbytes for parameters in uncompiled.values() for p in parameters.values()}
    if uncompiled:
        _named.update(uncompiled)
        largest = max(uncompiled, key=lambda module: sum(p.nbytes for p in uncompiled[module].values()))
        is_evaluated = any(session.owner(p) is not None for p in largest.parameters())
        logger.warning(
            "no %sgraph of %s (%s, ...)%s is compiled: %s of parameters are trained outside of the memory budget, with "
            "their gradients and states. Dynamo leaves the code to eager PyTorch (TORCH_LOGS=graph_breaks says why, "
            "torch.compile(fullgraph=True) refuses it), or no call goes through what torch.compile returned",
            "training " if is_evaluated else "",
            type(largest).__name__,
            next(iter(uncompiled[largest])),
            f" and of {len(uncompiled) - 1} more modules" if len(uncompiled) > 1 else "",
            format_nbytes(sum(nbytes_of.values())),
        )
    return nbytes_of.keys()


def _is_trained(parameter: torch.Tensor) -> bool:
    """Whether a compiled graph makes gradients of a parameter; those of an evaluation make none."""
    hit = session.owner(parameter)
    return hit is not None and hit[1] in hit[0].trained


def _state_nbytes(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    state = optimizer.state.get(parameter, {})
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


def _warn_of_states(optimizer: Optimizer, nbytes: int) -> None:
    name = type(optimizer).__name__
    has_counterpart = name in ("Adam", "AdamW", "SGD") and type(optimizer).__module__.startswith("torch.")
    logger.warning(
        "%s.%s keeps %s of states on the compute device, outside of the memory budget; %s keeps them at home, within "
        "it",
        type(optimizer).__module__.removesuffix(f".{name.lower()}"),
        name,
        format_nbytes(nbytes),
        f"chunkc.optim.{name}" if has_counterpart else "an optimizer of chunkc.optim",
    )
