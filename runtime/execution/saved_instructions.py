"""Instructions of the executor for storages that are offloaded, or recomputed, between forward and backward.

Registers belong to the computation: copies that read them start after the computation so far, and only enqueued
computation writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc.ir import chunk_ops
from chunkc.runtime.execution.run import Instruction, Registers, Run
from chunkc.runtime.execution.saved import SavedValues
from chunkc.runtime.store.slots import fill_with_nan

Targets = tuple[tuple[int, int], ...]
"""Pairs (register, index of one of a storage's values)."""


@dataclass(frozen=True)
class SavedWriteBack:
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
class SavedEvict:
    """Replace a storage's values by stand-ins: the backward gets them from home, or recomputes them."""

    storage: str
    sources: tuple[int, ...]
    cleared: tuple[int, ...]
    targets: Targets

    def __call__(self, registers: Registers, run: Run) -> None:
        run.store.tier.enqueue(self._replace, registers, _saved(run), run.store.slots.debug)

    def _replace(self, registers: Registers, saved: SavedValues, debug: bool) -> None:
        if not saved.is_copied(self.storage):
            saved.note(self.storage, [registers[index] for index in self.sources])
        elif debug:
            value = registers[self.sources[0]]
            fill_with_nan(torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage()))
        _exchange(registers, self.cleared, self.targets, saved.stand_ins(self.storage))


@dataclass(frozen=True)
class SavedPrefetch:
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
class SavedWait:
    """Let computation wait for the copy of a storage that is under way, in or out.

    Attributes:
        values: makes the storage's values after a copy back; None after one home.
    """

    storage: str
    values: MakeValues | None

    def __call__(self, registers: Registers, run: Run) -> None:
        _hold_for(self.storage, run)
        if self.values is not None:
            self.values(registers, run)


@dataclass(frozen=True)
class MakeValues:
    """Make the saved values of a storage that has come back, or that the backward has recomputed.

    Attributes:
        source: register of the buffer that it came back to, or of a recomputed value that lies in it.
    """

    storage: str
    source: int
    recomputed: bool
    cleared: tuple[int, ...]
    targets: Targets

    def __call__(self, registers: Registers, run: Run) -> None:
        run.store.tier.enqueue(self._make, registers, _saved(run))

    def _make(self, registers: Registers, saved: SavedValues) -> None:
        make = saved.recomputed if self.recomputed else saved.values
        _exchange(registers, self.cleared, self.targets, make(self.storage, registers[self.source]))


def _saved(run: Run) -> SavedValues:
    assert run.saved is not None, "the plan offloads or recomputes values, and the run has none"
    return run.saved


def _hold_for(storage: str, run: Run) -> None:
    run.store.slots.hold_for(_saved(run).under_way.pop(storage))


def _exchange(registers: Registers, cleared: Iterable[int], targets: Targets, values: Sequence[torch.Tensor]) -> None:
    """Clear registers that nothing reads any more, and fill others with a storage's values, or their stand-ins."""
    for index in cleared:
        registers[index] = None
    for index, position in targets:
        registers[index] = values[position]


def lower_saved(node: fx.Node, register: Mapping[fx.Node, int], last_reader: Mapping[fx.Node, fx.Node]) -> Instruction:
    """Lower a chunk node on a saved storage to its instruction.

    Args:
        register: by node that has a value.
        last_reader: by node that another node reads.
    """
    args: Any = node.args
    storage, rest = str(args[0]), args[1:]
    targets: Any = tuple(
        (register[user], user.args[1]) for user in node.users if user in last_reader and user in register
    )
    cleared = tuple(register[source] for source in node.all_input_nodes if last_reader[source] is node)
    if node.target is chunk_ops.evict:
        return SavedEvict(storage, tuple(register[value] for value in rest), cleared, targets)
    if node.target is chunk_ops.recompute:
        return MakeValues(storage, register[rest[0]], True, cleared, targets)
    if node.target is chunk_ops.wait:
        values = MakeValues(storage, register[rest[1]], False, cleared, targets) if rest[1:] else None
        return SavedWait(storage, values)
    link, nbytes, *values = rest
    if node.target is chunk_ops.write_back:
        return SavedWriteBack(storage, link, nbytes, tuple(register[value] for value in values))
    assert node.target is chunk_ops.prefetch, node.format_node()
    return SavedPrefetch(storage, link, nbytes, register[node])
