"""`chunkc explain --why NAME`: where a part of the model is at each moment of a planned step, and what it would cost to
have it elsewhere.

An alternative is the same step, planned and verified again with that part forced to stay, or to move, and all else as
it was: its seconds and its smallest budget are the planner's and the simulator's, no estimate beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from chunkc.explaining.dry_run import DryRun
from chunkc.explaining.memory_timeline import StepPlans, makers_of
from chunkc.explaining.predicted_step import PredictedStep
from chunkc.ir.errors import BudgetError, OptionsError
from chunkc.ir.explanation import Alternative, Happening, TimedEvent, Why
from chunkc.ir.items import KEEP_ALL, ActivationPlan, MovedId
from chunkc.ir.layout import PARAM, Chunk
from chunkc.ir.links import INWARD
from chunkc.ir.plan import ARRIVE, EVICT, LEAVE, OFFLOAD, PREFETCH, RELOAD, WAIT, WRITE_BACK
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
    OFFLOAD: "copied home",
    LEAVE: "let go",
    RELOAD: "fetched",
    ARRIVE: "needed",
}
"""What an event does, in words."""


@dataclass(frozen=True)
class ModelPart:
    """What of the model is asked about.

    Attributes:
        groups: chunk groups that hold the part.
        small: parameters in no chunk, which always stay.
        saved: (graph, storage) -> bytes, of values that its modules save for the backward and that may go home.
    """

    groups: tuple[int, ...]
    small: tuple[str, ...]
    saved: Mapping[tuple[int, str], int]


def model_part_named(name: str, predicted: PredictedStep, dry_run: DryRun) -> ModelPart:
    """The part that a user means: a parameter, a module, a chunk (`param:3`) or a saved storage (`forward.2:0`).

    Raises:
        OptionsError: there is none of that name; names those that are near.
    """
    layout = predicted.layout
    of_group = {group.index: [s.spec.name for s in group.slices] for group in layout.groups}
    saved = _saved_by_module(dry_run)
    storages = {storage: module for module, found in saved.items() for _, storage in found}

    def is_below(full: str) -> bool:
        return full == name or full.startswith(f"{name}.")

    groups = tuple(index for index, names in of_group.items() if any(map(is_below, names)))
    small = tuple(spec.name for spec in layout.small if is_below(spec.name))
    values = {key: nbytes for module, found in saved.items() if is_below(module) for key, nbytes in found.items()}
    if name in storages:
        values = {key: nbytes for found in saved.values() for key, nbytes in found.items() if key[1] == name}
    if not groups:
        groups = tuple(i for i, g in enumerate(layout.groups) if name in {str(Chunk(k, i)) for k in g.update_kinds})
    if not (groups or small or values):
        known = [*layout.specs(), *saved, *storages, *(name.rpartition(".")[0] for name in layout.specs())]
        near = get_close_matches(name, [one for one in dict.fromkeys(known) if one], n=3, cutoff=0.5)
        hint = f"; near it are {', '.join(near)}" if near else ""
        raise OptionsError(
            f"--why: the model has no parameter, module, chunk (param:0) or saved value named {short(name)}{hint}"
        )
    return ModelPart(groups, small, values)


def _saved_by_module(dry_run: DryRun) -> dict[str, dict[tuple[int, str], int]]:
    """Module -> (graph, storage) -> bytes, of every value that may go home between forward and backward."""
    found: dict[str, dict[tuple[int, str], int]] = {}
    for graph, captured in enumerate(dry_run.captured):
        makers = makers_of(captured)
        for one in captured.offloadable if captured.backward is not None else ():
            found.setdefault(makers.get(one.storage, ""), {})[graph, one.storage] = one.nbytes
    return found


def happenings(step: StepPlans, events: Sequence[TimedEvent], part: ModelPart) -> Iterator[Happening]:
    """All that the plan does to a part, stop after stop; of the waits for copies home only those that take time."""
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
                kind = "stall" if planned.kind in (WAIT, ARRIVE, LEAVE) else planned.kind
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
    found = sorted(happenings(step, predicted.events(step), part), key=lambda one: one.at_s)
    return Why(name, tuple(_chosen(part, dry_run)), tuple(found), tuple(_alternatives(part, predicted, dry_run)))


Storages = frozenset[tuple[int, str]]
"""(graph, storage) of saved values."""


def _absent(dry_run: DryRun) -> tuple[Storages, Storages]:
    """Those that go home in the planned step, and those that are made again."""
    found = [
        (run.graph, run.request.context.activation_plan or KEEP_ALL) for run in dry_run.runs if run.phase == FORWARD
    ]
    home = frozenset((graph, storage) for graph, absent in found for storage in absent.offloaded)
    return home, frozenset((graph, storage) for graph, absent in found for storage in absent.recomputed)


def _chosen(part: ModelPart, dry_run: DryRun) -> Iterator[str]:
    resident, whole = dry_run.planner_state.resident, dry_run.planner_state.layout.replicated
    for names, does in (
        ([str(Chunk(PARAM, g)) for g in part.groups if g in resident], "stays on the device, with gradient and states"),
        (
            [str(Chunk(PARAM, g)) for g in part.groups if g in whole],
            "stands whole on every rank; gradient and states move",
        ),
        ([str(Chunk(PARAM, g)) for g in part.groups if g not in resident | whole], "moves, with gradient and states"),
    ):
        if names:
            yield f"{_listed(names)}: {does}"
    if part.small:
        yield f"{_listed(part.small)}: in no chunk, too small to move, and stays on the device"
    home, again = _absent(dry_run)
    for keys, does in (
        (part.saved.keys() & home, "goes home between forward and backward"),
        (part.saved.keys() & again, "dropped, and made again by the backward"),
        (part.saved.keys() - home - again, "kept on the device until the backward has read it"),
    ):
        if keys:
            yield f"saved {_listed([storage for _, storage in sorted(keys)])}: {does}"


def _listed(names: Sequence[object]) -> str:
    shown = ", ".join(map(str, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _alternatives(part: ModelPart, predicted: PredictedStep, dry_run: DryRun) -> Iterator[Alternative]:
    resident, (home, again) = dry_run.planner_state.resident, _absent(dry_run)
    if predicted.layout.cut:  # what ranks share moves, and what they save stays
        return
    own = frozenset(part.saved)
    remade = frozenset(key for key in own if key[1] in _repeatable(dry_run.captured[key[0]]))
    ways = (
        ("all its chunks stay on the device", resident.union(part.groups), (home, again)),
        ("all its chunks move", resident.difference(part.groups), (home, again)),
        ("its saved values are kept on the device", resident, (home - own, again - own)),
        ("its saved values go home", resident, (home | own, again - own)),
        ("its saved values are made again", resident, (home - remade, again | remade)),
    )
    for what, staying, away in ways:
        if (staying, away) == (resident, (home, again)):
            continue
        try:
            step = predicted.planned(_forced(predicted, dry_run, staying, away))
            yield Alternative(what, step_time(predicted.events(step)).total)
        except BudgetError as error:
            yield Alternative(what, None, error.minimum_nbytes)


def _repeatable(captured: Captured) -> frozenset[str]:
    return frozenset() if captured.repeatable is None else captured.repeatable.droppable


def _forced(
    predicted: PredictedStep, dry_run: DryRun, resident: frozenset[int], absent: tuple[Storages, Storages]
) -> DryRun:
    """The same step, with these residents, these saved values at home, and these made again."""
    training, planner_state = predicted.training, replace(dry_run.planner_state, resident=resident)
    moving_now = dry_run.planner_state.resident - resident if len(dry_run.captured) == 1 else frozenset[int]()
    in_backward: set[int] = set()
    runs = []
    for run in dry_run.runs:
        context = run.request.context
        updates = training.updated_in_backward(planner_state, {group for group, _ in context.updates} | moving_now)
        away = ActivationPlan(
            *(frozenset(storage for graph, storage in found if graph == run.graph) for found in absent)
        )
        made, transient = dry_run.captured[run.graph].trained, run.request.planner_state.layout.transient
        if transient or resident - dry_run.planner_state.resident:
            transient = training.transient(planner_state, made, updates, frozenset())
        context = replace(
            context, updates=updates, undoable=training.undoable(updates), activation_plan=away, transient=transient
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
