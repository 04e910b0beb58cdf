"""Complete a `BudgetError`: name the values that fill its peak, and estimate what would need less.

Estimates come from the positions of the step that lacks room. With half the batch its values take half of the bytes;
with half the chunk size its chunks do. Other activations are planned as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from chunkc.ir.errors import BudgetError
from chunkc.ir.text import is_of_a_loss
from chunkc.ir.units import short_nbytes
from chunkc.options import MIN_CHUNK_NBYTES
from chunkc.passes.memory.profile import call_steps
from chunkc.policy.activation_search import leanest_form
from chunkc.policy.captured_step import Captured
from chunkc.policy.needs import ExternalBytes, Needs, needs_of_step
from chunkc.policy.state import PlannerState


def explained(error: BudgetError, form: Captured, planner_state: PlannerState, external: ExternalBytes) -> BudgetError:
    """Return the error with what fills its peak and, if no other step needs as much, with what would need less.

    Args:
        form: of the graph that lacks room, with its leanest activation plan.
        planner_state: with the graph that lacks room.
    """
    operations = (step.op for memory in form.memories.values() for step in memory.steps)
    error = replace(error, values=_values_at(form, error), has_loss=any(map(is_of_a_loss, operations)))
    needs = needs_of_step(form, planner_state.trained, planner_state.layout, external)
    if needs.minimum_nbytes(planner_state.layout) < error.minimum_nbytes:
        return error
    return error.with_remedies(_remedies(needs, form, planner_state, external))


def _remedies(
    needs: Needs, form: Captured, planner_state: PlannerState, external: ExternalBytes
) -> Iterator[tuple[str, int]]:
    layout, trained = planner_state.layout, planner_state.trained
    halved = needs_of_step(form, trained, layout, external, values=0.5)
    yield "half the batch or sequence length", halved.minimum_nbytes(layout)
    if planner_state.activations == "keep" and not layout.cut:  # ranks that train together have no other choice
        leanest = needs_of_step(leanest_form(form, "auto", layout), trained, layout, external)
        yield 'activations="auto", the default', leanest.minimum_nbytes(layout)
    largest_nbytes = max((s.spec.nbytes for group in layout.groups for s in group.slices), default=0)
    smaller_nbytes = layout.chunk_nbytes // 2
    if smaller_nbytes >= max(largest_nbytes, MIN_CHUNK_NBYTES) and not layout.cut:
        doubled = needs_of_step(form, trained, layout, external, values=2)
        smaller = Needs(doubled.moving_nbytes // 2, needs.all_resident_nbytes)
        size = short_nbytes(smaller_nbytes).replace(".00", "").replace(" ", "")
        yield f'chunk_size="{size}"', smaller.minimum_nbytes(layout)


def _values_at(form: Captured, error: BudgetError) -> list[tuple[str, int]]:
    """Return (module, bytes) of the values at the error's peak, largest first; none if the peak is another form's."""
    for program in form.programs.values():
        for call, steps in zip(program.calls, call_steps(program, form.memories), strict=True):
            if call.name == error.call:
                fullest = max(steps, key=lambda step: step.nbytes)
                by_module = {fullest.module or "the model": fullest.inside_nbytes}
                for storage in fullest.around:
                    maker = form.makers.get(storage, "inputs")
                    by_module[maker] = by_module.get(maker, 0) + program.storages[storage]
                if sum(by_module.values()) <= error.values_nbytes:
                    return sorted(((m, n) for m, n in by_module.items() if n), key=lambda item: (-item[1], item[0]))
    return []
