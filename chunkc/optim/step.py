"""One step of a chunked optimizer: what is due, where each chunk group is updated, room for it all, and the updates.

Whatever may fail for want of room fails before anything is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from chunkc.distributed.agreement import rendezvous
from chunkc.ir.plan import Tile
from chunkc.kernels.formats import GradScale
from chunkc.optim.gradient_scaling import is_skipped, on_the_cpu
from chunkc.optim.group_spans import Due, Task, due_of, flat_home, spans_of
from chunkc.optim.over_ranks import check_over_ranks, note_step, order_of_norms, ranks_of_norms, sums_of_group
from chunkc.optim.rule import GroupWork, OverRanks, ResidentTensor, Spans
from chunkc.optim.undo import flat_shadow_copies
from chunkc.optim.update import PreparedUpdate, ResidentsLeft, prepare_updates
from chunkc.optim.update_mode import NONE, groups_at_home
from chunkc.runtime.store.shards import local_shard_of
from chunkc.session.changes import detect_changes, gradients_left_to_autograd
from chunkc.session.session import Session, managing

if TYPE_CHECKING:
    from chunkc.optim.optimizer import ChunkedOptimizer
    from chunkc.runtime.store.store import ChunkStore

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Prepared:
    """A session's part of a step: what is due, the groups that the CPU updates at home, the others' plan."""

    session: Session
    by_group: Mapping[int, Sequence[Task]]
    at_home: frozenset[int]
    in_slots: PreparedUpdate | None


def take_over_changes(parameters: Sequence[torch.Tensor]) -> None:
    """Take over what the user has changed of parameters at home (see `chunkc.session.changes`)."""
    names: dict[Session, list[str]] = {}
    for parameter in parameters:
        if (hit := managing(parameter)) is not None:
            names.setdefault(hit[0], []).append(hit[1])
    for session, of_session in names.items():
        session.store.trainers.claim(frozenset(of_session))
        detect_changes(session, of_session)
        gradients_left_to_autograd(session, of_session)


def prepare_step(optimizer: ChunkedOptimizer) -> tuple[Due, list[Prepared]]:
    """What is updated and how, once residents have left that had to make room for it.

    Raises:
        BudgetError, HomeError, OptionsError, UnsupportedError, DistributedError: see `ChunkedOptimizer.step`.
    """
    check_over_ranks(optimizer)
    note_step(optimizer)
    with rendezvous(ranks_of_norms(optimizer)) as compare:
        due, prepared = _prepared(optimizer)
        compare(lambda: order_of_norms(optimizer, prepared))
    return due, prepared


def _prepared(optimizer: ChunkedOptimizer) -> tuple[Due, list[Prepared]]:
    while True:
        due = due_of(optimizer)
        begun = optimizer.in_backward.collect(optimizer, due.chunked, due.in_place)
        try:
            return due, [
                _prepare(optimizer, session, by_group, begun.get(session, frozenset()) - session.store.resident)
                for session, by_group in due.chunked.items()
            ]
        except ResidentsLeft:
            continue


def _prepare(
    optimizer: ChunkedOptimizer, session: Session, by_group: Mapping[int, list[Task]], begun: frozenset[int]
) -> Prepared:
    """Groups that have `begun` count: where a group is updated does not depend on when."""
    groups, num_stages = session.store.layout.groups, optimizer.rule.num_stages
    session.unfreeze({t.name for index in by_group if not groups[index].trainable for t in by_group[index]})
    optimizer.lay_out([task.parameter for tasks in by_group.values() for task in tasks])
    home = groups_at_home(
        session, [groups[index] for index in sorted({*by_group, *begun})], optimizer.overlap.update_on, num_stages
    )
    if optimizer.overlap.in_backward:
        optimizer.in_backward.prepare(optimizer, session, begun.union(by_group), home)
    if optimizer.overlap.undoable:
        session.store.shadow_copies.reserve(session.store.layout, sorted(begun.union(by_group)))
    for index in sorted(by_group):
        session.store.updates.wait(index)
        session.keepers.keep(optimizer, index, [task.name for task in by_group[index]])
    for index in sorted(home - begun):
        session.store.reserve_states(index)
    in_slots = [index for index in by_group if index not in home]
    planned = prepare_updates(session, in_slots, num_stages=num_stages) if in_slots else None
    return Prepared(session, by_group, home - begun, planned)


def update_chunks(optimizer: ChunkedOptimizer, prepared: Prepared, scale: GradScale) -> None:
    """Update a session's groups: the device's are only enqueued where it can run on, then the CPU does its own.

    The CPU begins when all that was computed before the step has arrived at home.
    """
    session, home, overlaps = prepared.session, prepared.at_home, optimizer.overlap.mode != NONE
    store = session.store
    spans = {index: group_spans(optimizer, session, index, tasks) for index, tasks in prepared.by_group.items()}
    marks: list[Any] = []
    if home:
        store.release_slots()
        for index in sorted(home):
            store.collect_gradients(index)
        marks += store.tier.mark()
    if overlaps:
        optimizer.under_way.submit(optimizer, session, {index: spans[index] for index in home}, scale, marks)
    if prepared.in_slots is not None:
        updater, tiles = optimizer.updater(store.tier.device), prepared.in_slots.tiles
        ranges = {i: [(t.begin, t.end) for t in tiles if t.group == i and t.stage == 0] for i in spans if i not in home}
        works = [GroupWork(i, spans[i], ranges[i], scale, _sums(optimizer, store, i)) for i in ranges if ranges[i]]
        prepared.in_slots.run({work.index: updater.of_group(work) for work in works})
    if overlaps:
        optimizer.under_way.end_step(session, home)
        return
    for mark in marks:
        mark.wait()
    if home and not is_skipped(scale := on_the_cpu(scale)):
        for index in sorted(home):
            at_home(optimizer, session, index, spans[index], scale)()


def group_spans(optimizer: ChunkedOptimizer, session: Session, index: int, tasks: Sequence[Task]) -> Spans:
    """The elements of a chunk group to update."""
    return spans_of(session, index, tasks, merged=optimizer.rule.num_stages == 1)


def at_home(
    optimizer: ChunkedOptimizer,
    session: Session,
    index: int,
    spans: Spans,
    scale: GradScale,
    *,
    in_shadow_copies: bool = False,
) -> Callable[[], None]:
    """The update of a group in home memory, by the CPU; home must be as all computation leaves it when it runs.

    Args:
        in_shadow_copies: leave home as it is (see `undo`).
    """
    numel, num_stages = session.store.layout.groups[index].numel, optimizer.rule.num_stages
    work = GroupWork(index, spans, [(0, numel)], scale, _sums(optimizer, session.store, index))
    update = optimizer.updater(_CPU, by_triton=False).of_group(work)
    home, fill = flat_shadow_copies(session, index) if in_shadow_copies else (flat_home(session, index), None)

    def run() -> None:
        if fill is not None:
            fill()
        for stage in range(num_stages):
            update(home, Tile(index, 0, numel, stage, num_stages))

    return run


def _sums(optimizer: ChunkedOptimizer, store: ChunkStore, index: int) -> OverRanks | None:
    """How ranks add up the norms of a group, if the optimizer asks for any."""
    return sums_of_group(store, index) if optimizer.rule.num_stages > 1 else None


def job_of(
    optimizer: ChunkedOptimizer,
    session: Session,
    index: int,
    spans: Spans,
    scale: GradScale,
    *,
    in_shadow_copies: bool = False,
) -> Callable[[], None]:
    """The same for any thread. Whatever it needs is compiled here: Inductor may not be safe on others."""
    optimizer.updater(_CPU, by_triton=False).compile_ahead(flat_home(session, index), spans, scale)
    return at_home(optimizer, session, index, spans, scale, in_shadow_copies=in_shadow_copies)


def update_in_place(
    optimizer: ChunkedOptimizer,
    tasks: Sequence[tuple[torch.Tensor, int]],
    scale: GradScale,
    numbers: Mapping[torch.Tensor, int] | None = None,
) -> None:
    """Update parameters that do not move, given with the index of their parameter group.

    Args:
        numbers: each parameter's place among all of the optimizer's, where it is known.
    """
    groups = optimizer.param_groups
    states = [optimizer.state_on_tier(parameter, groups[index]) for parameter, index in tasks]
    if numbers is None:
        numbers = {p: number for number, p in enumerate(local_shard_of(p) for group in groups for p in group["params"])}
    known: dict[tuple[int, int], Any] = {}

    def hyper_at(index: int, step: int) -> Any:
        if (index, step) not in known:
            known[index, step] = optimizer.hyper_at(groups[index], step)
        return known[index, step]

    def staying(device: torch.device) -> Iterator[ResidentTensor]:
        for (parameter, index), state in zip(tasks, states, strict=True):
            if parameter.device == device:
                hyper = optimizer.next_hyper(parameter, partial(hyper_at, index))
                if parameter.numel() == 0 and optimizer.rule.num_stages == 1:  # fewer rows than there are ranks
                    continue
                kinds = {kind: value for kind, value in state.items() if kind != "step"}
                yield ResidentTensor(parameter, hyper, kinds, numbers[parameter])

    for device in dict.fromkeys(parameter.device for parameter, _ in tasks):
        tensors, scale_there = staying(device), on_the_cpu(scale) if device == _CPU else scale
        if is_skipped(scale_there):
            list(tensors)  # the step is counted, and corrected with those of the device (see `pending_steps`)
        else:
            optimizer.updater(device).of_tensors(tensors, scale_there)
