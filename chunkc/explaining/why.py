"""Answer `chunkc explain --why NAME`: where a part of the model is at each moment, and what alternatives would cost.

An alternative is the same step, planned and verified again with that part forced to be resident, or to move, and all
else as it was: its seconds and its smallest budget come from the simulator and the planner, not from an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from chunkc.explaining.dry_run import DryRun
from chunkc.explaining.memory_timeline import StepPlans
from chunkc.explaining.predicted_step import PredictedStep
from chunkc.ir.errors import BudgetError, OptionsError
from chunkc.ir.explanation import Alternative, Happening, TimedEvent, Why
from chunkc.ir.items import KEEP_ALL, ActivationPlan, MovedId
from chunkc.ir.layout import PARAM, Chunk
from chunkc.ir.links import INWARD
from chunkc.ir.plan import EVICT, PREFETCH, WAIT, WRITE_BACK
from chunkc.ir.program import BACKWARD, FORWARD
from chunkc.ir.simulate import step_time
from chunkc.ir.text import short
from chunkc.passes.planning.updates_in_backward import updated_in
from chunkc.policy.captured_step import Captured
from chunkc.policy.plans import backward_positions

SAID = {
    PREFETCH: "fetched",
    WAIT: "needed",
    WRITE_BACK: "copied home",
    EVICT: "let go",
}
"""An event kind -> its effect, in words."""


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that a name stands for.

    Attributes:
        groups: chunk groups that hold the part.
        small: parameters in no chunk, which are always resident.
        saved: (graph, storage) -> bytes, of saved values of its modules that may be offloaded.
    """

    groups: tuple[int, ...]
    small: tuple[str, ...]
    saved: Mapping[tuple[int, str], int]


def model_part_named(name: str, predicted: PredictedStep, dry_run: DryRun) -> ModelPart:
    """Find the part of a model that a name stands for.

    A name is that of a parameter, a module, a chunk (`param:3`) or a saved storage (`forward.2:0`).

    Raises:
        OptionsError: there is none of that name; the error lists similar names.
    """
    layout = predicted.layout
    of_group = {group.index: [s.spec.name for s in group.slices] for group in layout.groups}
    saved = _saved_by_module(dry_run)
    storages = {storage: module for module, values in saved.items() for _, storage in values}

    def is_below(full: str) -> bool:
        return full == name or full.startswith(f"{name}.")

    groups = tuple(index for index, names in of_group.items() if any(map(is_below, names)))
    small = tuple(spec.name for spec in layout.small if is_below(spec.name))
    chosen = {key: nbytes for module, values in saved.items() if is_below(module) for key, nbytes in values.items()}
    if name in storages:
        chosen = {key: nbytes for values in saved.values() for key, nbytes in values.items() if key[1] == name}
    if not groups:
        groups = tuple(i for i, g in enumerate(layout.groups) if name in {str(Chunk(k, i)) for k in g.update_kinds})
    if not (groups or small or chosen):
        known = [*layout.specs(), *saved, *storages, *(name.rpartition(".")[0] for name in layout.specs())]
        near = get_close_matches(name, list(filter(None, dict.fromkeys(known))), n=3, cutoff=0.5)
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise OptionsError(
            f"--why: the model has no parameter, module, chunk (param:0) or saved value named {short(name)}{hint}"
        )
    return ModelPart(groups, small, chosen)


def _saved_by_module(dry_run: DryRun) -> dict[str, dict[tuple[int, str], int]]:
    """Return module -> (graph, storage) -> bytes, for all saved values that may be offloaded."""
    by_module: dict[str, dict[tuple[int, str], int]] = {}
    for graph, captured in enumerate(dry_run.captured):
        makers = captured.makers
        for saved in captured.offloadable if captured.backward is not None else ():
            by_module.setdefault(makers.get(saved.storage, ""), {})[graph, saved.storage] = saved.nbytes
    return by_module


def happenings(step: StepPlans, events: Sequence[TimedEvent], part: ModelPart) -> Iterator[Happening]:
    """Yield the plan's events for a part, stop after stop; waits for copies home only if they take time."""
    spans = {event.name: event for event in events if event.kind in ("call", "update")}
    timed: dict[tuple[str, str, str], list[TimedEvent]] = {}
    for event in events:
        timed.setdefault((event.phase, event.kind, event.name), []).append(event)
    storages = {storage for _, storage in part.saved}
    now = 0.0
    for phase in step.phases:
        for index, stop in enumerate(phase.stops):
            moment = phase.moments[index] if index < len(phase.moments) else None
            until = math.inf if moment is None else spans[moment.name].start_s
            for planned in stop:
                if not _concerns(planned.item, part, storages):
                    continue
                kind = "stall" if planned.kind == WAIT else planned.kind
                of_kind = timed.get((phase.phase, kind, str(planned.item)), [])
                took = of_kind.pop(0) if of_kind and (kind != "stall" or of_kind[0].start_s <= until) else None
                goes_home = planned.kind == WAIT and planned.link not in INWARD
                if goes_home and took is None:
                    continue
                if kind == "stall" and took is not None:
                    now = took.end_s
                yield Happening(
                    at_s=now if took is None or kind == "stall" else took.start_s,
                    phase=phase.phase,
                    item=str(planned.item),
                    what="home" if goes_home else SAID[planned.kind],
                    nbytes=planned.nbytes,
                    copy_s=0.0 if took is None or kind == "stall" else took.end_s - took.start_s,
                    stall_s=0.0 if took is None or kind != "stall" else took.end_s - took.start_s,
                    before="" if moment is None else moment.name,
                    module="" if moment is None else moment.module,
                )
            if moment is not None:
                now = spans[moment.name].end_s


def _concerns(item: MovedId, part: ModelPart, storages: set[str]) -> bool:
    return item.group in part.groups if isinstance(item, Chunk) else str(item) in storages


def why_is(name: str, predicted: PredictedStep, dry_run: DryRun) -> Why:
    """Answer for one part of the model.

    Raises:
        OptionsError: see `model_part_named`.
    """
    part = model_part_named(name, predicted, dry_run)
    step = predicted.planned(dry_run)
    in_order = sorted(happenings(step, predicted.events(step), part), key=lambda happening: happening.at_s)
    return Why(name, tuple(_chosen(part, dry_run)), tuple(in_order), tuple(_alternatives(part, predicted, dry_run)))


Storages = frozenset[tuple[int, str]]
"""(graph, storage) of saved values."""


def _moved(dry_run: DryRun) -> tuple[Storages, Storages]:
    """Return the saved values that are offloaded, and those that are recomputed."""
    plans = [
        (run.graph, run.request.context.activation_plan or KEEP_ALL) for run in dry_run.runs if run.phase == FORWARD
    ]
    offloaded = frozenset((graph, storage) for graph, plan in plans for storage in plan.offloaded)
    return offloaded, frozenset((graph, storage) for graph, plan in plans for storage in plan.recomputed)


def _chosen(part: ModelPart, dry_run: DryRun) -> Iterator[str]:
    resident, whole = dry_run.planner_state.resident, dry_run.planner_state.layout.replicated
    for names, does in (
        ([str(Chunk(PARAM, g)) for g in part.groups if g in resident], "stays on the device, with gradient and states"),
        (
            [str(Chunk(PARAM, g)) for g in part.groups if g in whole],
            "whole on every rank; gradient and states move",
        ),
        ([str(Chunk(PARAM, g)) for g in part.groups if g not in resident | whole], "moves, with gradient and states"),
    ):
        if names:
            yield f"{_listed(names)}: {does}"
    if part.small:
        yield f"{_listed(part.small)}: in no chunk, too small to move, and stays on the device"
    offloaded, recomputed = _moved(dry_run)
    for keys, does in (
        (part.saved.keys() & offloaded, "goes home between forward and backward"),
        (part.saved.keys() & recomputed, "dropped, and made again by the backward"),
        (part.saved.keys() - offloaded - recomputed, "kept on the device until the backward has read it"),
    ):
        if keys:
            yield f"saved {_listed([storage for _, storage in sorted(keys)])}: {does}"


def _listed(names: Sequence[object]) -> str:
    shown = ", ".join(map(str, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _alternatives(part: ModelPart, predicted: PredictedStep, dry_run: DryRun) -> Iterator[Alternative]:
    resident, (offloaded, recomputed) = dry_run.planner_state.resident, _moved(dry_run)
    if predicted.layout.cut:  # over ranks chunks always move and saved values never do
        return
    own = frozenset(part.saved)
    droppable = frozenset(key for key in own if key[1] in _repeatable(dry_run.captured[key[0]]))
    alternatives = (
        ("all its chunks stay on the device", resident.union(part.groups), (offloaded, recomputed)),
        ("all its chunks move", resident.difference(part.groups), (offloaded, recomputed)),
        ("its saved values are kept on the device", resident, (offloaded - own, recomputed - own)),
        ("its saved values go home", resident, (offloaded | own, recomputed - own)),
        ("its saved values are made again", resident, (offloaded - droppable, recomputed | droppable)),
    )
    for sentence, forced_resident, moved in alternatives:
        if (forced_resident, moved) == (resident, (offloaded, recomputed)):
            continue
        try:
            step = predicted.planned(_forced(predicted, dry_run, forced_resident, moved))
            yield Alternative(sentence, step_time(predicted.events(step)).total)
        except BudgetError as error:
            yield Alternative(sentence, None, error.minimum_nbytes)


def _repeatable(captured: Captured) -> frozenset[str]:
    return frozenset() if captured.repeatable is None else captured.repeatable.droppable


def _forced(
    predicted: PredictedStep, dry_run: DryRun, resident: frozenset[int], moved: tuple[Storages, Storages]
) -> DryRun:
    """Return the step with these residents, and with saved values `moved`: offloaded, and recomputed."""
    training, planner_state = predicted.training, replace(dry_run.planner_state, resident=resident)
    moving_now = dry_run.planner_state.resident - resident if len(dry_run.captured) == 1 else frozenset[int]()
    in_backward: set[int] = set()
    runs = []
    for run in dry_run.runs:
        context = run.request.context
        away = ActivationPlan(
            *(frozenset(storage for graph, storage in storages if graph == run.graph) for storages in moved)
        )
        groups = {group for group, _ in context.updates} | moving_now
        forced = training.phase_context(planner_state, groups, dry_run.captured[run.graph].trained)
        transient = run.request.planner_state.layout.transient
        if transient or resident - dry_run.planner_state.resident:
            transient = forced.transient
        context = replace(
            context, updates=forced.updates, undoable=forced.undoable, activation_plan=away, transient=transient
        )
        planned_for = replace(planner_state, layout=replace(planner_state.layout, transient=transient))
        request = replace(run.request, planner_state=planned_for, context=context)
        if run.phase == BACKWARD:
            captured = dry_run.captured[run.graph].following(away)
            in_backward |= updated_in(backward_positions(captured, request, training.hardware))
        runs.append(replace(run, request=request))
    in_slots, at_home = training.updated(planner_state)
    transient = frozenset(in_backward & resident)
    update = replace(
        dry_run.update,
        planner_state=replace(planner_state, layout=replace(planner_state.layout, transient=transient)),
        groups=tuple(group for group in in_slots if group not in in_backward),
        transient=transient,
    )
    return replace(dry_run, planner_state=planner_state, runs=tuple(runs), update=update, cpu_updated=at_home)
