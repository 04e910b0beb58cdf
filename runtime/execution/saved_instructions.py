"""Instructions of the executor for storages that are offloaded, or recomputed, between forward and backward.

Registers belong to the computation: copies that read them start after the computation so far, and only enqueued
computation writes them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc.ir import chunk_ops
from chunkc.runtime.execution.run import Instruction, Registers, Run
from chunkc.runtime.execution.saved import SavedValues
from chunkc.runtime.store.slots import fill_with_nan

SAVED_OPS = frozenset(
    {chunk_ops.offload, chunk_ops.leave, chunk_ops.reload, chunk_ops.arrive, chunk_ops.forget, chunk_ops.again}
)
"""Chunk nodes that become instructions of this module."""

Targets = tuple[tuple[int, int], ...]
"""Pairs (register, index of one of a storage's values)."""


@dataclass(frozen=True)
class Offload:
    """Start to copy a storage home."""

    storage: str
    link: str
    nbytes: int
    sources: tuple[int, ...]

    def __call__(self, registers: Registers, run: Run) -> None:
        saved, tier = _saved(run), run.store.tier
        job = saved.writer(self.storage, self.nbytes, lambda: [registers[index] for index in self.sources])
        saved.under_way[self.storage] = tier.links[self.link].submit(job, after=tier.mark())
        run.store.slots.traffic.to_home_nbytes += self.nbytes


@dataclass(frozen=True)
class Leave:
    """Replace an offloaded storage's values by stand-ins, after its copy home."""

    storage: str
    sources: tuple[int, ...]
    targets: Targets

    def __call__(self, registers: Registers, run: Run) -> None:
        _hold_for(self.storage, run)
        run.store.tier.enqueue(self._replace, registers, _saved(run), run.store.slots.debug)

    def _replace(self, registers: Registers, saved: SavedValues, debug: bool) -> None:
        if debug:
            value = registers[self.sources[0]]
            fill_with_nan(torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage()))
        for index in self.sources:
            registers[index] = None
        stand_ins = saved.stand_ins(self.storage)
        for index, position in self.targets:
            registers[index] = stand_ins[position]


@dataclass(frozen=True)
class Reload:
    """Start to copy an offloaded storage back into a new buffer."""

    storage: str
    link: str
    nbytes: int
    target: int

    def __call__(self, registers: Registers, run: Run) -> None:
        saved, store = _saved(run), run.store
        store.slots.drop_spare()
        registers[self.target] = buffer = store.tier.allocate_slot(self.nbytes, torch.uint8)
        if store.slots.debug:
            store.tier.enqueue(fill_with_nan, buffer)
        job = saved.reader(self.storage, buffer)
        saved.under_way[self.storage] = store.tier.links[self.link].submit(job, after=store.tier.mark())
        store.slots.traffic.to_device_nbytes += self.nbytes


@dataclass(frozen=True)
class Arrive:
    """Make the values of a reloaded storage, after its copy."""

    storage: str
    source: int
    targets: Targets

    def __call__(self, registers: Registers, run: Run) -> None:
        _hold_for(self.storage, run)
        run.store.tier.enqueue(self._take, registers, _saved(run))

    def _take(self, registers: Registers, saved: SavedValues) -> None:
        values = saved.values(self.storage, registers[self.source])
        registers[self.source] = None
        for index, position in self.targets:
            registers[index] = values[position]


@dataclass(frozen=True)
class Forget:
    """Replace a storage's values by stand-ins: the backward recomputes them."""

    storage: str
    sources: tuple[int, ...]
    cleared: tuple[int, ...]
    targets: Targets

    def __call__(self, registers: Registers, run: Run) -> None:
        run.store.tier.enqueue(self._forget, registers, _saved(run))

    def _forget(self, registers: Registers, saved: SavedValues) -> None:
        saved.note(self.storage, [registers[index] for index in self.sources])
        for index in self.cleared:
            registers[index] = None
        stand_ins = saved.stand_ins(self.storage)
        for index, position in self.targets:
            registers[index] = stand_ins[position]


@dataclass(frozen=True)
class Again:
    """Make the saved values of a storage that the backward has recomputed."""

    storage: str
    source: int
    cleared: tuple[int, ...]
    targets: Targets

    def __call__(self, registers: Registers, run: Run) -> None:
        run.store.tier.enqueue(self._take, registers, _saved(run))

    def _take(self, registers: Registers, saved: SavedValues) -> None:
        values = saved.recomputed(self.storage, registers[self.source])
        for index in self.cleared:
            registers[index] = None
        for index, position in self.targets:
            registers[index] = values[position]


def _saved(run: Run) -> SavedValues:
    assert run.saved is not None, "the plan offloads or recomputes values, and the run has none"
    return run.saved


def _hold_for(storage: str, run: Run) -> None:
    start_s = time.perf_counter()
    run.store.tier.hold_for(_saved(run).under_way.pop(storage))
    run.store.slots.traffic.wait_s += time.perf_counter() - start_s


def lower_saved(node: fx.Node, register: Mapping[fx.Node, int], last_reader: Mapping[fx.Node, fx.Node]) -> Instruction:
    """Lower a node of `SAVED_OPS` to its instruction.

    Args:
        register: by node that has a value.
        last_reader: by node that another node reads.
    """
    args: Any = node.args
    targets: Any = tuple(
        (register[user], user.args[1]) for user in node.users if user in last_reader and user in register
    )
    cleared = tuple(register[source] for source in node.all_input_nodes if last_reader[source] is node)
    if node.target is chunk_ops.forget:
        return Forget(args[0], tuple(register[value] for value in args[1:]), cleared, targets)
    if node.target is chunk_ops.again:
        return Again(args[0], register[args[1]], cleared, targets)
    storage, link, *rest = args
    if node.target is chunk_ops.offload:
        nbytes, *values = rest
        return Offload(storage, link, nbytes, tuple(register[value] for value in values))
    if node.target is chunk_ops.leave:
        return Leave(storage, tuple(register[value] for value in rest), targets)
    if node.target is chunk_ops.reload:
        return Reload(storage, link, rest[0], register[node])
    return Arrive(storage, register[rest[0]], targets)
