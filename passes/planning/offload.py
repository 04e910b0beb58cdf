"""Choose which saved storages to offload between forward and backward, and bound when their copies may run.

A storage is copied home after the forward's last call that holds it, and back before the backward's first call that
reads it. Storages and not values: a view may be the last value in its storage. Storages of the user's outputs and
inputs stay on the compute tier, since the caller holds them, and so do small ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from chunkc.ir.items import SavedStorage
from chunkc.ir.plan import Position
from chunkc.ir.program import FORWARD, PhaseProgram
from chunkc.passes.planning.copy_scheduling import Interval

SMALL_NBYTES = 4096
"""Smallest saved storage to offload: of a smaller one, the latency of a copy costs more than its room is worth."""


@dataclass(frozen=True)
class Saved:
    """A storage that may be at home between the phases.

    Attributes:
        last: index of the forward's last call that holds it.
        first: index of the backward's first call that reads it.
    """

    storage: str
    nbytes: int
    last: int
    first: int


def candidates(forward: PhaseProgram, backward: PhaseProgram | None) -> tuple[Saved, ...]:
    """List every storage that may be at home between the phases, in order of its last use."""
    if backward is None:
        return ()
    storage_of = forward.value_storages
    saved = [value for value in forward.outputs[forward.num_user_outputs :] if value is not None]
    odd = {storage_of[value] for value in saved if value not in forward.plain}
    own = {storage_of[value] for value in forward.outputs[: forward.num_user_outputs] if value is not None}
    storages = {storage_of[value] for value in saved} - own - odd - forward.held - backward.held
    storages = {storage for storage in storages if forward.storages[storage] >= SMALL_NBYTES}
    last = {s: at for at, call in enumerate(forward.calls) for s in _held_by(call.inputs + call.outputs, storage_of)}
    in_backward = backward.value_storages
    first: dict[str, int] = {}
    for at, call in enumerate(backward.calls):
        for storage in _held_by(call.inputs, in_backward):
            first.setdefault(storage, at)
    uses = [Saved(s, forward.storages[s], last[s], first[s]) for s in storages if s in last and s in first]
    return tuple(sorted(uses, key=lambda saved: (saved.last, saved.storage)))


def _held_by(values: Sequence[str], storage_of: Mapping[str, str]) -> set[str]:
    return {storage_of[value] for value in values}


def with_offloaded(program: PhaseProgram, storages: Collection[str]) -> PhaseProgram:
    """Return the forward, or its backward, with these storages at home in between."""
    if not storages:
        return program
    if program.phase == FORWARD:
        forward, kept = program.with_stand_ins(storages)
        assert kept.keys() == set(storages), "only candidates are offloaded"
        return replace(forward, copied=kept)
    copied: dict[str, list[str]] = {}
    for name, storage in program.inputs.items():
        if storage in storages:
            copied.setdefault(storage, []).append(name)
    return replace(program, copied={storage: tuple(values) for storage, values in copied.items()})


def copies(saved: Sequence[Saved], forward: Sequence[int] | None, backward: Sequence[int]) -> list[Interval]:
    """Return the copies of offloaded storages, as intervals that may become longer.

    Args:
        forward, backward: places of the phases' calls in the line; None: the forward has run.
    """
    intervals = []
    for storage in saved:
        item = SavedStorage(storage.storage)
        if forward is not None:
            at = forward[storage.last]
            intervals.append(Interval(item, storage.nbytes, at, at, True, at + 1, at + 1, loads=False))
        at = backward[storage.first]
        intervals.append(Interval(item, storage.nbytes, at, at, False, at, at))
    return intervals


def choose(
    saved: Sequence[Saved], forward: Sequence[Position], backward: Sequence[Position], room_nbytes: Sequence[int]
) -> frozenset[str]:
    """Choose storages to offload so that all calls have room: the longest away first.

    Args:
        forward, backward: the calls, with every storage kept.
        room_nbytes: of each of these calls, bytes for values on top of all that it cannot do without.

    Returns:
        No more than needed; all candidates if even they do not make the room.
    """
    needed = [at.non_model_nbytes for at in (*forward, *backward)]
    missing = np.array(needed, dtype=np.int64) - np.array(room_nbytes, dtype=np.int64)
    chosen: dict[Saved, NDArray[np.int64]] = {}  # -> a view of `missing`: the calls during which it is away
    for storage in sorted(saved, key=lambda saved: (saved.last - saved.first, -saved.nbytes, saved.storage)):
        away = missing[storage.last + 1 : len(forward) + storage.first]
        if away.size and away.max() > 0:
            chosen[storage] = away
            away -= storage.nbytes
    if missing.size and missing.max() <= 0:
        for storage in sorted(chosen, key=lambda saved: (saved.first - saved.last, saved.storage)):
            away = chosen[storage]
            if away.max() + storage.nbytes <= 0:
                del chosen[storage]
                away += storage.nbytes
    return frozenset(saved.storage for saved in chosen)
