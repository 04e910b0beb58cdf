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
from chunkc.passes.planning import fixed_nbytes, plan_phases, update_positions
from chunkc.runtime.executor import Executable, Measurement, Run, lower
from chunkc.session import Session


@dataclass(frozen=True)
class GroupUpdate:
    """The update of one chunk group: a function of its slots, kind -> flat buffer, that changes them in place."""

    group: int
    update: Callable[[Mapping[str, torch.Tensor]], None]


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

    def update(group: int) -> None:
        kinds = store.layout.groups[group].update_kinds
        slots = {kind: store.begin_compute(chunk_name(kind, group)) for kind in kinds}
        updates[group].update(slots)
        for kind in kinds:
            store.end_compute(chunk_name(kind, group), wrote=kind != GRAD)

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
        plan = plan_phases(
            [(UPDATE, update_positions(layout, groups, held_nbytes))],
            layout,
            budget_nbytes=budget,
            resident=resident,
            hardware=session.hardware,
        )
        graph = insert_update_events(plan.phases[0], groups, layout)
        if session.options.verify:
            violations = verify_phase(
                graph.graph,
                layout=layout,
                memories={},
                fixed_nbytes=fixed_nbytes(layout, resident) + held_nbytes,
                budget_nbytes=budget,
            )
            if violations:
                raise VerificationError(violations)
        found = session.update_plans[key] = (lower(graph.graph, {}), plan)
    return found
