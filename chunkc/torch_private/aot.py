"""AOTAutograd: tracing, partitioning, decompositions, and its alias check of custom operators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # before the others: these modules import each other in a circle
from torch import fx
from torch._decomp import get_decompositions
from torch._functorch import config, partitioners
from torch._functorch._aot_autograd import graph_compile, runtime_wrappers
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops.wrap import uid as checkpoint_ids
from torch._library.simple_registry import singleton
from torch._library.utils import is_builtin
from torch._logging._internal import trace_log
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from chunkc.torch_private.fake import TracingContext, tracing

__all__ = [
    "ALIAS_CHECK",
    "LazyGraphModule",
    "aot_module_simplified",
    "get_decompositions",
    "min_cut_rematerialization_partition",
    "run_and_save_rng_state",
    "run_with_rng_state",
]

ALIAS_CHECK: type[AbstractContextManager[Any]] | None = getattr(
    runtime_wrappers, "_AnalyzeCustomOpInputOutputMode", None
)
"""Dispatch mode that checks whether a custom operator returns memory that it was given; None if PyTorch has none (all
versions in `versions.CHECKED` do, and an option switches it off)."""


def next_checkpoint_id() -> int:
    """Return a new id for the nodes of one activation checkpoint (`meta["ac_graph_id"]`)."""
    return next(checkpoint_ids)


def outside_alias_check() -> AbstractContextManager[Any]:
    """Leave the alias check's dispatch mode inside the block, if it is the innermost mode."""
    if ALIAS_CHECK is not None and isinstance(_get_current_dispatch_mode(), ALIAS_CHECK):
        return _pop_mode_temporarily()
    return nullcontext()


def checks_aliases() -> bool:
    """Whether AOTAutograd is configured to check custom operators for aliasing."""
    return ALIAS_CHECK is not None and getattr(config, "check_custom_op_aliasing", False)


def is_custom(node: fx.Node) -> bool:
    """Whether a node runs an operator that is not PyTorch's own."""
    return isinstance(node.target, torch._ops.OpOverload) and not is_builtin(node.target)


def random_states_as_values() -> AbstractContextManager[Any]:
    """Let AOTAutograd keep random generators' states as values inside the graph, as on a CPU.

    On CUDA they would otherwise be graph inputs, which no caller passes.
    """
    return config.patch(graphsafe_rng_functionalization=False)


@contextmanager
def states_kept_for(draws: Callable[[fx.Node], bool]) -> Iterator[None]:
    """Let the partitioner save random generators' states only for recomputed operators that draw random numbers.

    By itself it saves them for every recomputed operator that may draw.

    Args:
        draws: whether a node draws random numbers.
    """
    keep_states = partitioners.functionalize_rng_ops

    def keep_fewer(joint: fx.GraphModule, *args: Any) -> Any:
        needless = [node for node in joint.graph.nodes if "recompute" in node.meta and not draws(node)]
        marks = [node.meta.pop("recompute") for node in needless]
        try:
            return keep_states(joint, *args)
        finally:
            for node, mark in zip(needless, marks, strict=True):
                node.meta["recompute"] = mark

    with patch.object(partitioners, "functionalize_rng_ops", keep_fewer):
        yield


@contextmanager
def linalg_checks_decomposed() -> Iterator[None]:
    """Let `aten._linalg_check_errors` be decomposed like other operators.

    Its only effect is that it raises. AOTAutograd would order that effect by tokens: graph inputs and outputs that no
    plan knows.
    """
    effects = singleton.find("aten::_linalg_check_errors").effect
    known = effects.effect
    effects.register(None)
    try:
        yield
    finally:
        effects.register(known)


def are_graphs_logged() -> bool:
    """Whether AOTAutograd's graphs go to a log: that of `TORCH_TRACE`, or one of `TORCH_LOGS`."""
    logs = (graph_compile.aot_graphs_log, graph_compile.aot_joint_log)
    return bool(trace_log.handlers) or any(log.isEnabledFor(logging.INFO) for log in logs)


@contextmanager
def without_unread_texts() -> Iterator[None]:
    """Keep AOTAutograd from writing graphs as text for logs that are off.

    It writes them at every compilation: of 24 layers, in 3 % of the time of a second start.
    """
    if are_graphs_logged():
        yield
        return
    with (
        patch.object(graph_compile, "_log_joint_graph", lambda *_: None),
        patch.object(graph_compile, "_log_fw_bw_graphs", lambda *_: (None, None)),
    ):
        yield


def without_unread_code() -> AbstractContextManager[Any]:
    """Keep graphs that are made inside the block from being written as Python code that only running them needs."""
    return _use_lazy_graph_module(True)


class NotCopied(LazyGraphModule):
    """A backward of which AOTAutograd makes no copy for its compiler, by which a second backward could be compiled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NotCopied:
        return self


def in_a_tracing_context() -> AbstractContextManager[Any]:
    """Make sure that AOTAutograd has a tracing context for its metadata: Dynamo's, or a new one outside of Dynamo."""
    return nullcontext() if TracingContext.try_get() is not None else tracing(TracingContext(None))


def forbid_donation() -> tuple[int, ...]:
    """Forbid the backward to overwrite its inputs, so that a graph may be retained; call it as the forward is compiled.

    Returns:
        Indices of the inputs (buffers) that the forward changes. Its first outputs are their new values, in this order.
    """
    context = TracingContext.get()
    assert context.fw_metadata is not None
    if donated := context.fw_metadata.bw_donated_idxs:
        donated.clear()  # in place: another record, which AOTAutograd reads as the backward runs, has the same list
    context.fw_metadata.bw_donated_idxs = []
    return tuple(context.fw_metadata.mutated_inp_runtime_indices)


def marked_as_boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function as boxed for AOTAutograd: it takes one list, which it may empty. Return the function."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function
