"""Instructions of the executor for storages that are absent between forward and backward.

What is in registers is the computation's: it is read by copies that start after the computation so far, and written by
what is enqueued.
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
"""The chunk nodes that become instructions of this module."""

Targets = tuple[tuple[int, int], ...]
"""(register, which of a storage's values)."""


@dataclass(frozen=True)
class Offload:
    storage: str
    link: str
    nbytes: int
    sources: tuple[int, ...]

    def __call__(self, registers: Registers, run: Run) -> None:
        saved, tier = _saved(run), run.store.tier
        job = saved.writer(self.storage, self.nbytes, lambda: [registers[index] for index in self.sources])
        saved.under_way[self.storage] = tier.links[self.link].submit(job, after=tier.mark())
        run.store.traffic.to_home_nbytes += self.nbytes


@dataclass(frozen=True)
class Leave:
    storage: str
    sources: tuple[int, ...]
    targets: Targets

    def __call__(self, registers: Registers, run: Run) -> None:
        _hold_for(self.storage, run)
        run.store.tier.enqueue(self._give_up, registers, _saved(run), run.store.debug)

    def _give_up(self, registers: Registers, saved: SavedValues, debug: bool) -> None:
        if debug:
            value = registers[self.sources[0]]
            fill_with_nan(torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage()))
        for index in self.sources:
            registers[index] = None
        stand_ins = saved.stand_ins(self.storage)
        for index, place in self.targets:
            registers[index] = stand_ins[place]


@dataclass(frozen=True)
class Reload:
    storage: str
    link: str
    nbytes: int
    target: int

    def __call__(self, registers: Registers, run: Run) -> None:
        saved, store = _saved(run), run.store
        store.drop_spare_slots()
        registers[self.target] = buffer = store.tier.allocate_slot(self.nbytes, torch.uint8)
        if store.debug:
            store.tier.enqueue(fill_with_nan, buffer)
        job = saved.reader(self.storage, buffer)
        saved.under_way[self.storage] = store.tier.links[self.link].submit(job, after=store.tier.mark())
        store.traffic.to_device_nbytes += self.nbytes


@dataclass(frozen=True)
class Arrive:
    storage: str
    source: int
    targets: Targets

    def __call__(self, registers: Registers, run: Run) -> None:
        _hold_for(self.storage, run)
        run.store.tier.enqueue(self._take, registers, _saved(run))

    def _take(self, registers: Registers, saved: SavedValues) -> None:
        values = saved.values(self.storage, registers[self.source])
        registers[self.source] = None
        for index, place in self.targets:
            registers[index] = values[place]


@dataclass(frozen=True)
class Forget:
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
        for index, place in self.targets:
            registers[index] = stand_ins[place]


@dataclass(frozen=True)
class Again:
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
        for index, place in self.targets:
            registers[index] = values[place]


def _saved(run: Run) -> SavedValues:
    assert run.saved is not None, "the plan has absent values, and the run has none"
    return run.saved


def _hold_for(storage: str, run: Run) -> None:
    start_s = time.perf_counter()
    run.store.tier.hold_for(_saved(run).under_way.pop(storage))
    run.store.traffic.wait_s += time.perf_counter() - start_s


def lower_saved(node: fx.Node, register: Mapping[fx.Node, int], last_reader: Mapping[fx.Node, fx.Node]) -> Instruction:
    """The instruction of a node of `SAVED_OPS`.

    Args:
        register: of every node that has a value.
        last_reader: of every node that some other node reads.
    """
    args: Any = node.args
    targets: Any = tuple(
        (register[user], user.args[1]) for user in node.users if user in last_reader and user in register
    )
    cleared = tuple(register[one] for one in node.all_input_nodes if last_reader[one] is node)
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
