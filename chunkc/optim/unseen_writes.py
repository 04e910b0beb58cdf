"""Find what was written between the beginning of a staged update and its commit, where no version counter sees it.

A user may write parameters and gradients through `.data`, an array, a kept view, a collective or a kernel of another
library: checksums of what the update reads are compared with checksums of home, where a GPU and the CPU share the work.
Of gradients that nothing has used since, it is a sample. States are larger, and only the optimizer gives them out: an
update counts as written to if the user has asked for states since it began, or if other code refers to its states or
views them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from chunkc.ir.layout import GRAD, Chunk
from chunkc.ir.sums import Checksum
from chunkc.kernels import row_sums_cpu, row_sums_triton
from chunkc.kernels.row_sums import MIXED_WORD
from chunkc.optim.group_updates import flat_home
from chunkc.optim.on_device import computes_by_triton
from chunkc.optim.stepping import SteppingOptimizer
from chunkc.optim.update_task import UpdateTask, Where
from chunkc.runtime.store.checksums import KINDS, SAMPLED, words_of
from chunkc.runtime.store.gradients import has_external_views, references
from chunkc.runtime.store.shards import leaf_of
from chunkc.runtime.store.store import ChunkStore
from chunkc.session.session import Session


def _checksum_on(device: torch.device) -> Checksum:
    return row_sums_triton.checksums if computes_by_triton(device) else row_sums_cpu.checksums


def note_slots(store: ChunkStore, group: int) -> None:
    """Note what the slots of a group's parameters and gradients contain, in the order of computation."""
    chunks = {kind: Chunk(kind, group) for kind in KINDS}
    data = {kind: store.slots.begin_compute(chunk) for kind, chunk in chunks.items()}
    store.tier.enqueue(store.checksums.on_tier(group).note, _checksum_on(store.tier.device), data)
    for chunk in chunks.values():
        store.slots.end_compute(chunk)


def noting_home(session: Session, group: int, job: Callable[[], None]) -> Callable[[], None]:
    """Return a job on any thread that notes what a group's home contains, and then runs `job`."""
    data, table = flat_home(session, group), session.store.checksums.on_host(group)
    # Compiled on this thread, since Inductor may not be safe on others.
    row_sums_cpu.library(MIXED_WORD, words_of(data[KINDS[0]]).dtype, rounded=False)

    def run() -> None:
        table.note(row_sums_cpu.checksums, data)
        job()

    return run


def written_groups(session: Session, updates: Mapping[int, UpdateTask]) -> set[int]:
    """Find groups with parameters or gradients at home that are not what was noted when their updates began.

    Waits for all computation enqueued so far, and for updates at home.

    Args:
        updates: by group.

    Raises:
        StreamError, HomeError: an update or a copy of a group's home had failed.
    """
    store, checksums = session.store, session.store.checksums
    reads = [
        _Read(index, kind, kind == GRAD and all(noted.has_unused_gradient for noted in update.noted))
        for index, update in updates.items()
        for kind in KINDS
    ]
    in_slots = {index for index, update in updates.items() if update.where is Where.SLOTS}
    for_tier, for_host = _divided(session, [read for read in reads if read.group in in_slots])
    for_host += [read for read in reads if read.group not in in_slots]
    before = store.tier.mark() if for_host else ()
    for index, kind, sample in for_tier:
        data = store.slots.home_on_tier(Chunk(kind, index))
        table = checksums.on_tier(index)
        store.tier.enqueue(partial(table.compute, sample=sample), _checksum_on(store.tier.device), kind, data)
    after = store.tier.mark() if for_tier else ()
    for mark in before:
        mark.wait()
    for index, kind, sample in for_host:
        store.updates.wait(index)
        data = flat_home(session, index)[kind]
        checksums.on_host(index).compute(row_sums_cpu.checksums, kind, data, sample=sample)
    for mark in after:
        mark.wait()
    return {index for index, kind, sample in reads if not checksums.on_host(index).is_unchanged(kind, sample=sample)}


class _Read(NamedTuple):
    """A kind of data of a group that is read once more; a sample of it, or all."""

    group: int
    kind: str
    sample: bool


def _divided(session: Session, reads: Iterable[_Read]) -> tuple[list[_Read], list[_Read]]:
    """Divide reads of homes between the compute tier, over the link, and the CPU, so that both end at one time."""
    for_tier, for_host = list[_Read](), list[_Read]()
    tier_rate, host_rate = session.hardware.home_read_rates
    tier_nbytes = host_nbytes = 0.0
    for read in reads:
        nbytes = session.store.layout.groups[read.group].nbytes(read.kind) / (SAMPLED if read.sample else 1)
        if (tier_nbytes + nbytes) * host_rate <= (host_nbytes + nbytes) * tier_rate:
            tier_nbytes += nbytes
            for_tier.append(read)
        else:
            host_nbytes += nbytes
            for_host.append(read)
    return for_tier, for_host


def noted_states(states: Mapping[str, torch.Tensor]) -> list[tuple[str, int, int]]:
    """Return kind, object and version of each of a parameter's states."""
    return [(kind, id(state), state._version) for kind, state in states.items()]


def has_other_readers(optimizer: SteppingOptimizer, parameters: Iterable[torch.Tensor]) -> bool:
    """Whether code outside of chunkc refers to states of these parameters, or views them, and may write them unseen."""
    if _is_shared(vars(optimizer), "state"):
        return True
    states_by_leaf = vars(optimizer)["state"]
    for leaf in map(leaf_of, parameters):
        if _is_shared(states_by_leaf, leaf):
            return True
        states = states_by_leaf[leaf]
        if any(_is_shared(states, kind) or has_external_views(states[kind]) for kind in states):
            return True
    return False


def _is_shared(container: Mapping[Any, Any], key: Any) -> bool:
    """Whether something besides this container refers to its value."""
    return references(partial(container.__getitem__, key)) > _own_references()


@cache
def _own_references() -> int:
    """Measure `references` of an object that one dictionary refers to."""
    return references(partial({"state": object()}.__getitem__, "state"))
