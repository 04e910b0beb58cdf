"""Saved storages that go home between forward and backward: which may, which do, and when their copies may run.

A storage is copied home after the forward's last call that holds it, and back before the backward's first call that
reads it. Storages and not values: a view may be its storage's last keeper. Those of the user's outputs and inputs stay,
since others hold them, and so do small ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from chunkc.ir.items import SavedStorage
from chunkc.ir.plan import Position
from chunkc.ir.program import FORWARD, PhaseProgram
from chunkc.passes.planning.copy_scheduling import Interval

SMALL_NBYTES = 4096
"""Saved storages of fewer bytes stay: a copy's latency costs more than their room is worth."""


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
    """Every storage that may be at home between the phases, in order of its last use."""
    if backward is None:
        return ()
    storage_of = forward.value_storages()
    saved = [value for value in forward.outputs[forward.num_user_outputs :] if value is not None]
    odd = {storage_of[value] for value in saved if value not in forward.plain}
    own = {storage_of[value] for value in forward.outputs[: forward.num_user_outputs] if value is not None}
    found = {storage_of[value] for value in saved} - own - odd - forward.held - backward.held
    found = {storage for storage in found if forward.storages[storage] >= SMALL_NBYTES}
    last = {s: at for at, call in enumerate(forward.calls) for s in _held_by(call.inputs + call.outputs, storage_of)}
    of_backward = backward.value_storages()
    first: dict[str, int] = {}
    for at, call in enumerate(backward.calls):
        for storage in _held_by(call.inputs, of_backward):
            first.setdefault(storage, at)
    known = [Saved(s, forward.storages[s], last[s], first[s]) for s in found if s in last and s in first]
    return tuple(sorted(known, key=lambda one: (one.last, one.storage)))


def _held_by(values: Sequence[str], storage_of: Mapping[str, str]) -> set[str]:
    return {storage_of[value] for value in values}


def with_offloaded(program: PhaseProgram, storages: Collection[str]) -> PhaseProgram:
    """A forward, or its backward, where these storages are at home in between."""
    if not storages:
        return program
    copied: dict[str, list[str]] = {}
    if program.phase != FORWARD:
        for name, storage in program.inputs.items():
            if storage in storages:
                copied.setdefault(storage, []).append(name)
        return replace(program, copied={storage: tuple(values) for storage, values in copied.items()})
    storage_of, outputs, stand_ins = program.value_storages(), list(program.outputs), dict(program.stand_ins)
    for position, value in enumerate(program.outputs):
        if position >= program.num_user_outputs and value is not None and storage_of[value] in storages:
            values = copied.setdefault(storage_of[value], [])
            stand_ins[position] = storage_of[value], len(values)
            values.append(value)
            outputs[position] = None
    assert copied.keys() == set(storages), "only candidates leave"
    kept = {storage: tuple(values) for storage, values in copied.items()}
    return replace(program, outputs=tuple(outputs), copied=kept, stand_ins=stand_ins)


def copies(saved: Sequence[Saved], forward: Sequence[int] | None, backward: Sequence[int]) -> list[Interval]:
    """The copies of storages that are at home between the phases, as intervals that may become longer.

    Args:
        forward, backward: where in the line the calls of the phases are; None: the forward has run.
    """
    found = []
    for one in saved:
        item = SavedStorage(one.storage)
        if forward is not None:
            at = forward[one.last]
            found.append(Interval(item, one.nbytes, at, at, True, at + 1, at + 1, loads=False))
        at = backward[one.first]
        found.append(Interval(item, one.nbytes, at, at, False, at, at))
    return found


def choose(
    saved: Sequence[Saved], forward: Sequence[Position], backward: Sequence[Position], room_nbytes: Sequence[int]
) -> frozenset[str]:
    """The storages that leave so that all calls have room: those that are away for longest come first.

    Args:
        forward, backward: the calls, where every storage is kept.
        room_nbytes: of each of these calls, bytes for values beside all else that it cannot do without.

    Returns:
        No more than needed; where all that may leave does not make the room, all of it.
    """
    needed = [at.non_model_nbytes for at in (*forward, *backward)]
    missing = np.array(needed, dtype=np.int64) - np.array(room_nbytes, dtype=np.int64)
    chosen: dict[Saved, Any] = {}  # with what is missing while it is away
    for one in sorted(saved, key=lambda one: (one.last - one.first, -one.nbytes, one.storage)):
        away = missing[one.last + 1 : len(forward) + one.first]
        if away.size and away.max() > 0:
            chosen[one] = away
            away -= one.nbytes
    if missing.size and missing.max() <= 0:
        for one in sorted(chosen, key=lambda one: (one.first - one.last, one.storage)):
            away = chosen[one]
            if away.max() + one.nbytes <= 0:
                del chosen[one]
                away += one.nbytes
    return frozenset(one.storage for one in chosen)
