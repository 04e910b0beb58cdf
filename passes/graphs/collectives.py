"""Recognise, cost and run the model's own collectives, as in tensor parallelism.

    %sum = _c10d_functional.all_reduce(%x, "sum", "1");  %waited = _c10d_functional.wait_tensor(%sum)

The ranks of a rendezvous may have different plans, so no plan may move, repeat or leave out a collective. Each is a
segment of its own, with its wait, in the order of the graph, and runs as it is: Inductor never sees it.
"""

from __future__ import annotations

import operator
import re
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.utils import _pytree as pytree

from chunkc.ir.collectives import collective_s, ring_s
from chunkc.ir.errors import DistributedError
from chunkc.ir.hardware import Hardware
from chunkc.passes.graphs.graphs import tensors_of
from chunkc.passes.graphs.shapes import AS_TRACED, Shapes
from chunkc.torch_private.engine import storage_use_count, tensor_use_count
from chunkc.torch_private.process_groups import functional_collectives, looked_after, rank_in

WAIT = functional_collectives.wait_tensor.default

_MOMENT_S = 1.0

_NAMESPACES = ("_c10d_functional", "_dtensor")
_GROUP = re.compile(r"((?:_c10d_functional|_dtensor)\.[^\n]*, )('[^']*')(\))")


def is_collective(node: fx.Node) -> bool:
    """Whether an operation is a rendezvous of ranks, or the wait for one."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _NAMESPACES


def is_wait_for(node: fx.Node, before: fx.Node | None) -> bool:
    """Whether a node waits for the collective `before`."""
    return node.target is WAIT and before is not None and node.args[0] is before


def wait_at_once(graph: fx.Graph) -> None:
    """Move the wait for each collective right after it."""
    for node in graph.find_nodes(op="call_function", target=WAIT):
        (source,) = node.all_input_nodes
        if source.op != "placeholder":
            source.append(node)


def without_group_names(code: str) -> str:
    """Replace the names of process groups in a graph's code by numbers, in order of use.

    Ranks that run the same code in different groups have different names, and equal code with numbers.
    """
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        return f"{match[1]}group {numbers.setdefault(match[2], len(numbers))}{match[3]}"

    return _GROUP.sub(numbered, code)


@dataclass(frozen=True)
class Exchange:
    """A collective between the ranks that compute a layer collectively, from the side of one rank.

    Attributes:
        nbytes: of the gathered results on one rank, or of the data it scatters.
        times: passes through the ranks: an all-reduce is a scatter, then a gather.
        is_pairwise: each rank sends each other rank different data, so that no tree can serve them.
    """

    nbytes: int
    times: int = 1
    is_pairwise: bool = False

    def sent_nbytes(self, num_ranks: int) -> int:
        """Return the bytes that a rank sends, and receives, in a ring."""
        return self.times * self.nbytes * (num_ranks - 1) // num_ranks

    def seconds(self, hardware: Hardware) -> float:
        """Return the seconds of all passes, on the link between the devices of a layer."""
        num_ranks = hardware.devices_per_layer
        if num_ranks < 2:
            return 0.0
        link, time_s = hardware.between_devices_of_a_layer, ring_s if self.is_pairwise else collective_s
        return self.times * time_s(self.nbytes, num_ranks, link.bytes_per_s, link.latency_s)


def exchange_of(node: fx.Node, hardware: Hardware, shapes: Shapes = AS_TRACED) -> Exchange | None:
    """Return the exchange of an operation; None if ranks exchange nothing there.

    Gloo adds up all of a reduce-scatter's input on every rank (see `Rendezvous`).
    """
    if not is_collective(node) or node.target is WAIT:
        return None
    name = node.target.__name__  # type: ignore[union-attr]
    nbytes = sum(shapes.known(shapes.of(tensor).numel() * tensor.itemsize) for tensor in tensors_of(node))
    if name.startswith("all_gather"):
        return Exchange(nbytes)
    if name.startswith("reduce_scatter"):
        return Exchange(nbytes * hardware.devices_per_layer, times=2 if hardware.kind == "cpu" else 1)
    if "all_to_all" in name or "alltoall" in name:
        return Exchange(nbytes, is_pairwise=True)
    return Exchange(nbytes, times=2)


class Rendezvous:
    """Collective that is over when it returns, with no reference left to its memory except the caller's.

    Gloo's thread holds exchanged tensors for a moment longer than the wait; then a plan would release bytes that are
    still there. A reference older than `_MOMENT_S` is not gloo's, and is not waited for.
    """

    def __init__(self, target: torch._ops.OpOverload) -> None:
        self._target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            self._target is functional_collectives.reduce_scatter_tensor.default
            and args[1] == "sum"
            and not args[0].is_cuda
        ):
            return _reduce_scattered(*args)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        held = _holders(inputs)
        is_on_gpu = any(tensor.is_cuda for tensor in inputs)
        with looked_after(args[-1]) if is_on_gpu else nullcontext():
            results, structure = pytree.tree_flatten(self._started(*args, **kwargs))
            _wait(results)
        unshared = _holders([torch.empty(0)])
        wanted = [*held, *(unshared * len(results))]
        end = time.monotonic() + _MOMENT_S
        while any(map(operator.gt, [*_holders(inputs), *_holders(results)], wanted)) and time.monotonic() < end:
            time.sleep(0)
        return pytree.tree_unflatten(results, structure)

    def _started(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._target(*args, **kwargs)
        except dist.DistError as error:  # the group was aborted
            raise DistributedError(_LOST) from error


_LOST = (
    "in a collective of a layer another rank was gone, or did not come within the timeout of init_process_group. The "
    "first error of any rank is the cause. Start all ranks anew from the latest checkpoint"
)


def _wait(tensors: list[torch.Tensor]) -> None:
    """Wait for tensors; raise DistributedError if another rank is gone, or has not come."""
    try:
        for tensor in tensors:
            WAIT(tensor)
    except RuntimeError as error:
        raise DistributedError(_LOST) from error


def _holders(tensors: list[torch.Tensor]) -> list[int]:
    """Count the references to each tensor, in C++ and in Python, and to its memory.

    A C++ thread that releases a tensor holds the Python object until it has the interpreter's lock, after C++ has
    counted one less.
    """
    return [
        tensor_use_count(tensor) + storage_use_count(tensor.untyped_storage()) + sys.getrefcount(tensor)
        for tensor in tensors
    ]


def _reduce_scattered(tensor: torch.Tensor, operation: str, num_ranks: int, group: Any) -> torch.Tensor:
    """Reduce-scatter as gloo does, which adds up all of it on every rank, in memory that is released here at once."""
    rows = len(tensor) // num_ranks
    return (
        Rendezvous(functional_collectives.all_reduce.default)(tensor, operation, group)
        .narrow(0, rank_in(group) * rows, rows)
        .clone()
    )
