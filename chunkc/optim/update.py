"""The optimizer's step over chunk groups: planned, verified and run like any other phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from chunkc.ir.errors import BudgetError
from chunkc.ir.layout import Chunk
from chunkc.ir.plan import Tile
from chunkc.ir.program import UPDATE
from chunkc.ir.updates import update_stages
from chunkc.optim.rule import TileUpdate
from chunkc.policy.decide import decide
from chunkc.policy.needs import Needs
from chunkc.policy.plans import UpdatePlan, update_plan
from chunkc.policy.state import UpdateDue, UpdateRequest
from chunkc.runtime.execution.executor import Executable, lower
from chunkc.runtime.execution.run import Measurement, Run
from chunkc.runtime.store.store import ChunkStore
from chunkc.session.residency import stay
from chunkc.session.session import Session


@dataclass(frozen=True)
class PreparedUpdate:
    """An optimizer step that is sure to have its room at home and in the budget; nothing was changed yet."""

    session: Session
    planned: UpdatePlan
    executable: Executable

    @property
    def tiles(self) -> tuple[Tile, ...]:
        return self.planned.tiles

    def run(self, updates: Mapping[int, TileUpdate]) -> None:
        """Update the groups, tile by tile, each inside the budget.

        Raises:
            HomeError, StreamError: a copy failed.
        """
        store = self.session.store
        store.release_slots()
        store.replicated.keep(self.planned.request.planner_state.layout.replicated)

        def update(tile: Tile) -> None:
            compute(store, updates[tile.group], tile)

        plan = self.planned.plan.with_gradients(self.session.resident_gradients())
        measurement = Measurement.beginning(store, plan.phases[0].begin_nbytes)
        self.executable([], Run(store, measurement, update))
        self.session.records.note(UPDATE, plan, measurement)


def compute(store: ChunkStore, update: TileUpdate, tile: Tile, *, whole: Sequence[str] = ()) -> None:
    """Update one tile in slots, of which those of some kinds hold the `whole` chunk."""
    stage = update_stages(store.layout.groups[tile.group].update_kinds, tile.num_stages)[tile.stage]
    part = (tile.begin, tile.end)
    chunks = {kind: Chunk(kind, tile.group, None if kind in whole else part) for kind in stage.kinds}
    slots: dict[str, torch.Tensor] = {}
    for kind, chunk in chunks.items():
        slot = store.begin_compute(chunk)
        slots[kind] = slot[tile.begin : tile.end] if kind in whole else slot
    store.tier.enqueue(update, slots, tile)
    for kind, chunk in chunks.items():
        store.end_compute(chunk, wrote=kind in stage.writes)


class ResidentsLeft(Exception):
    """Residents have moved home to make room for an update: they are updated where they are now."""


def prepare_updates(session: Session, groups: Iterable[int], *, num_stages: int = 1) -> PreparedUpdate:
    """Plan the update of some groups, in stages (see `chunkc.ir.updates`).

    Raises:
        BudgetError: the slots one tile needs do not fit beside what the caller holds.
        HomeError: there is no room at home for the states.
        ResidentsLeft: there is room now.
    """
    in_order = tuple(sorted(groups))
    for group in in_order:
        session.store.reserve_states(group)
    session.live.watch(session.store.take_gradients_home())
    planner_state, external_nbytes = session.planner_state, session.live.external_to_update()
    transient = session.in_backward.transient(frozenset(), frozenset(), ())
    asked = UpdateRequest(planner_state, in_order, external_nbytes, num_stages, transient)
    found = session.update_plans.find(asked.key)
    if found is None:
        try:
            decision = decide(planner_state, UpdateDue(in_order, external_nbytes, num_stages, transient))
        except BudgetError as error:
            raise session.known.named(
                error, planner_state.layout, Needs(), planner_state.num_graphs, planner_state.trained
            ) from None
        if decision.request is None:
            stay(session, decision.planner_state)
            raise ResidentsLeft
        made = update_plan(decision.request, session.hardware, verified=session.options.verify)
        found = session.update_plans.keep(decision.request.key, (made, lower(made.graph, {})))
    return PreparedUpdate(session, *found)
