"""The optimizer's step over chunk groups: planned, verified and run like any other phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from chunkc.ir.chunks import chunk_name
from chunkc.ir.errors import BudgetError, VerificationError
from chunkc.ir.plan import Plan, Tile
from chunkc.ir.program import UPDATE
from chunkc.ir.updates import update_stages
from chunkc.ir.verify import verify_phase
from chunkc.known_needs import Needs
from chunkc.moving import stay
from chunkc.optim.rule import TileUpdate
from chunkc.passes.insert import insert_update_events
from chunkc.passes.update_planning import plan_update, staying_beside_update
from chunkc.runtime.executor import Executable, Measurement, Run, lower
from chunkc.session import Session


@dataclass(frozen=True)
class PreparedUpdate:
    """An optimizer step that is sure to have its room at home and in the budget; nothing was changed yet."""

    session: Session
    executable: Executable
    plan: Plan
    tiles: tuple[Tile, ...]

    def run(self, updates: Mapping[int, TileUpdate]) -> None:
        """Update the groups, tile by tile, each inside the budget.

        Raises:
            HomeError, StreamError: a copy failed.
        """
        store = self.session.store
        store.release_slots()

        def update(tile: Tile) -> None:
            stage = update_stages(store.layout.groups[tile.group].update_kinds, tile.num_stages)[tile.stage]
            chunks = {kind: chunk_name(kind, tile.group, (tile.begin, tile.end)) for kind in stage.kinds}
            slots = {kind: store.begin_compute(chunk) for kind, chunk in chunks.items()}
            store.tier.enqueue(updates[tile.group], slots, tile)
            for kind, chunk in chunks.items():
                store.end_compute(chunk, wrote=kind in stage.writes)

        measurement = Measurement()
        store.tier.lap_peak_nbytes()
        self.executable([], Run(store, measurement, update))
        self.session.record(UPDATE, self.plan, measurement)


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
    held_nbytes = max(session.update_held_nbytes, session.live.nbytes())
    try:
        return PreparedUpdate(session, *_planned(session, in_order, held_nbytes, num_stages))
    except BudgetError as error:
        layout, resident, budget = session.store.layout, session.store.resident, session.budget_nbytes
        trained = layout.groups_of(session.trained)
        try:
            staying = staying_beside_update(layout, in_order, trained, budget, held_nbytes, resident, num_stages)
            if staying == resident:
                raise error
        except BudgetError as refused:
            raise session.known.named(refused, layout, Needs(), session.num_graphs) from None
    stay(session, staying)
    raise ResidentsLeft


def _planned(
    session: Session, groups: tuple[int, ...], held_nbytes: int, num_stages: int
) -> tuple[Executable, Plan, tuple[Tile, ...]]:
    store = session.store
    layout, resident, budget = store.layout, store.resident, session.budget_nbytes
    key = (groups, held_nbytes, resident, len(layout.small), budget, num_stages, session.num_restatements)
    found = session.update_plans.find(key)
    if found is None:
        plan, tiles = plan_update(
            layout,
            groups,
            budget_nbytes=budget,
            resident=resident,
            hardware=session.hardware,
            held_nbytes=held_nbytes,
            num_stages=num_stages,
        )
        graph = insert_update_events(plan.phases[0], tiles)
        if session.options.verify:
            violations = verify_phase(
                graph.graph,
                layout=layout,
                memories={},
                resident=resident,
                held_nbytes=held_nbytes,
                budget_nbytes=budget,
                updates=groups,
            )
            if violations:
                raise VerificationError(violations)
        found = session.update_plans.keep(key, (lower(graph.graph, {}), plan, tiles))
    return found
