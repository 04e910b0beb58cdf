"""The optimizer's step over chunk groups: planned, verified and run like any other phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from chunkc.ir.chunks import GRAD, chunk_name
from chunkc.ir.errors import VerificationError
from chunkc.ir.plan import Plan
from chunkc.ir.program import UPDATE
from chunkc.ir.verify import verify_phase
from chunkc.passes.insert import insert_update_events
from chunkc.passes.planning import fixed_nbytes, plan_phases, update_positions, update_tiles
from chunkc.runtime.executor import Executable, Measurement, Run, lower
from chunkc.session import Session


@dataclass(frozen=True)
class GroupUpdate:
    """The update of one chunk group.

    `update(slots, begin)` changes slots in place: kind -> flat buffer of the elements from `begin` on.
    """

    group: int
    update: Callable[[Mapping[str, torch.Tensor], int], None]


def run_updates(session: Session, updates: Mapping[int, GroupUpdate]) -> None:
    """Update the groups, each inside the budget.

    Raises:
        BudgetError: the slots one group needs do not fit beside what the caller holds.
    """
    store = session.store
    store.release_slots()
    groups = tuple(sorted(updates))
    held_nbytes = max(session.update_held_nbytes, session.live.nbytes())
    executable, plan = _planned(session, groups, held_nbytes)

    def update(group: int, begin: int, end: int) -> None:
        chunks = {k: chunk_name(k, group, (begin, end)) for k in store.layout.groups[group].update_kinds}
        updates[group].update({kind: store.begin_compute(chunk) for kind, chunk in chunks.items()}, begin)
        for kind, chunk in chunks.items():
            store.end_compute(chunk, wrote=kind != GRAD)

    measurement = Measurement()
    store.tier.lap_peak_nbytes()
    executable([], Run(store, measurement, update))
    session.record(UPDATE, None, plan, measurement)


def _planned(session: Session, groups: tuple[int, ...], held_nbytes: int) -> tuple[Executable, Plan]:
    store = session.store
    layout, resident, budget = store.layout, store.resident, session.budget_nbytes
    key = (groups, held_nbytes, resident, len(layout.small), budget)
    found = session.update_plans.get(key)
    if found is None:
        fixed = fixed_nbytes(layout, resident) + held_nbytes
        tiles = update_tiles(layout, groups, budget - fixed)
        plan = plan_phases(
            [(UPDATE, update_positions(layout, tiles, held_nbytes))],
            layout,
            budget_nbytes=budget,
            resident=resident,
            hardware=session.hardware,
        )
        graph = insert_update_events(plan.phases[0], tiles)
        if session.options.verify:
            violations = verify_phase(
                graph.graph,
                layout=layout,
                memories={},
                fixed_nbytes=fixed,
                budget_nbytes=budget,
            )
            if violations:
                raise VerificationError(violations)
        found = session.update_plans[key] = (lower(graph.graph, {}), plan)
    return found
