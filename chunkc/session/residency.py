"""Move groups between home and the compute tier: parameters, gradients and states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from chunkc.ir.layout import Chunk, ChunkGroup, ChunkLayout
from chunkc.policy.state import PlannerState
from chunkc.runtime.storage.unassigned import unassigned_memory_of
from chunkc.session.declared_states import keeper_of
from chunkc.session.movable import shares_memory
from chunkc.session.pending_readers import await_readers
from chunkc.session.protocols import StateKeeper
from chunkc.session.session import Session

Kept = Mapping[str, tuple[StateKeeper, dict[str, Any]]]
"""A parameter's name -> the optimizer that keeps its states, and these."""


@torch.no_grad()
def place(
    session: Session, layout: ChunkLayout, parameters: Mapping[str, nn.Parameter], resident: frozenset[int]
) -> None:
    """Place groups (`ChunkStore.place`), and move the states of evicted residents home with them.

    New parameters that stay on the compute tier leave the home that they were built in (`chunkc.init`).

    Raises:
        HomeError, StreamError: see there; nothing has moved.
    """
    store = session.store
    await_readers([*parameters.values(), *store.views.parameters().values()])
    leaving = [layout.groups[index] for index in sorted(store.resident - resident)]
    states = {group: kept for group in leaving if (kept := _kept(session, group))}
    wanted = {Chunk(kind, group.index): group.nbytes(kind) for group in states for kind in group.state_kinds}
    store.arena.reserve(wanted)
    try:
        store.place(layout, parameters, resident)
    except BaseException:
        store.arena.free(list(wanted))
        raise
    on_cpu = store.tier.device.type == "cpu"
    for name, parameter in parameters.items():
        if store.views.is_managed(name) or unassigned_memory_of(parameter) is None:
            continue
        if not (on_cpu and shares_memory(parameter)):
            parameter.data = torch.empty_like(parameter, device=store.tier.device).copy_(parameter)
    for group, kept in states.items():
        for name, (keeper, state) in kept.items():
            session.keepers.keep(keeper, group.index, [name])
            store.reserve_states(group.index)
            for kind in group.state_kinds:
                store.write(kind, name, state[kind])
                state[kind] = store.views.home_view(kind, name)


def _kept(session: Session, group: ChunkGroup) -> Kept:
    """Return the states of a group's parameters, of all kinds that the group has room for at home."""
    found = {}
    for of_group in group.slices:
        parameter = session.store.views.parameters().get(of_group.spec.name)
        if parameter is None or (keeper := keeper_of(parameter)) is None:
            continue
        state = keeper.kept_states_of(parameter)
        if all(kind in state for kind in group.state_kinds):
            found[of_group.spec.name] = keeper, state
    return found


def stay(session: Session, planner_state: PlannerState) -> None:
    """Evict residents for good, all but those of a planner state; release replicated groups alike.

    Raises:
        HomeError, StreamError: nothing has moved.
    """
    store = session.store
    if planner_state.resident != store.resident:
        place(session, store.layout, {}, planner_state.resident)
    if planner_state.layout.replicated_by_choice != store.layout.replicated_by_choice:
        store.set_layout(planner_state.layout)
