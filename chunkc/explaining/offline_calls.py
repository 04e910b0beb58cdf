"""Log the graphs' calls of a step on fake tensors, with the storages that are alive when each begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from chunkc.passes.graphs.graphs import placeholders, returned, storage_key
from chunkc.passes.graphs.symbols import hint


@dataclass(frozen=True)
class PhaseCall:
    """A run of a graph's forward or backward.

    Attributes:
        graph: its number.
        phase: `forward` or `backward`.
        arguments, outputs: the storage of each value, by number; None if the value is no tensor.
        names: of the outputs, in the graph as it was traced.
        alive: storages of this call's arguments, and of earlier calls, that are alive when it begins.
    """

    graph: int
    phase: str
    arguments: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    names: tuple[str | None, ...]
    alive: frozenset[int]


class CallLog:
    """Log of calls. Storages are numbered, and not kept alive."""

    def __init__(self) -> None:
        self.calls: list[PhaseCall] = []
        self.nbytes: list[int] = []
        """Bytes of each storage."""
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}

    def run(
        self, graph: int, phase: str, module: fx.GraphModule, arguments: list[Any], skipped: Iterable[int] = ()
    ) -> list[Any]:
        """Log a run of a traced graph. Return fake results, None where they are `skipped`; empty `arguments`."""
        taken = self._numbers(arguments)
        alive = self.alive()
        results = _results(module, arguments, frozenset(skipped))
        names = tuple(None if node is None else node.name for node in returned(module.graph))
        self.calls.append(PhaseCall(graph, phase, taken, self._numbers(results), names, alive))
        return results

    def add_unrun(self, graph: int, phase: str, module: fx.GraphModule) -> None:
        """Log a call of a traced graph that is not run: its storages have no numbers."""
        names = tuple(None if node is None else node.name for node in returned(module.graph))
        arguments = (None,) * len(placeholders(module.graph))
        self.calls.append(PhaseCall(graph, phase, arguments, (None,) * len(names), names, frozenset()))

    def _numbers(self, values: Sequence[Any]) -> tuple[int | None, ...]:
        return tuple(self._number(value) if isinstance(value, Tensor) else None for value in values)

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)  # unique as long as a reference to the storage exists, even a weak one
        if key not in self._storages:
            self._storages[key] = len(self.nbytes), StorageWeakRef(storage)
            self.nbytes.append(int(storage.nbytes()))
        return self._storages[key][0]

    def alive(self) -> frozenset[int]:
        """Return the storages that are alive now."""
        return frozenset(number for number, ref in self._storages.values() if not ref.expired())


@torch.no_grad()
def _results(module: fx.GraphModule, arguments: list[Any], skipped: frozenset[int]) -> list[Any]:
    """Make fake results of a traced graph that share storages, with arguments and each other, as its own results do."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    storages: dict[int, Tensor] = {}
    for node, value in zip(nodes, arguments, strict=True):
        traced = node.meta.get("val")
        if isinstance(traced, Tensor) and isinstance(value, Tensor):
            storages.setdefault(storage_key(traced), value)
    arguments.clear()
    results: list[Any] = []
    for position, node in enumerate(returned(module.graph)):
        value = None if node is None or position in skipped else node.meta["val"]
        if isinstance(value, Tensor):
            value = _over(value, storages)
        results.append(hint(value))
    return results


def _over(traced: Tensor, storages: dict[int, Tensor]) -> Tensor:
    """Make a fake tensor like a traced one, over the storage that stands for the traced one's."""
    key = storage_key(traced)
    shape, stride = (tuple(map(hint, numbers)) for numbers in (traced.shape, traced.stride()))
    base = storages.get(key)
    if base is None or base.dtype != traced.dtype:
        numel = hint(traced.untyped_storage().nbytes()) // traced.itemsize
        base = storages[key] = torch.empty(numel, dtype=traced.dtype, device=traced.device)
    return base.as_strided(shape, stride, hint(traced.storage_offset()))
