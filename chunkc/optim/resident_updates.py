"""The optimizer's side of updates, by a backward, of groups that stay on the compute tier (see `passes.early_updates`).

Nothing moves for such an update: it is the optimizer's step of these parameters, made earlier, with the same kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.kernels.formats import NO_SCALE
from chunkc.optim.memory_checks import check_in_place
from chunkc.optim.running_updates import label_of
from chunkc.optim.step import update_in_place
from chunkc.optim.update_scheduler import Begun, interrupted
from chunkc.passes.planning.update_placement import can_update_resident
from chunkc.runtime.store.consumed_gradients import ConsumedGradient, gradient_of
from chunkc.runtime.store.shards import local_shard_of
from chunkc.session.declared_states import declared
from chunkc.session.pending_readers import await_readers
from chunkc.session.session import Session, owner

if TYPE_CHECKING:
    from chunkc.optim.optimizer import ChunkedOptimizer


@dataclass(frozen=True)
class ResidentGroups:
    """The groups of a session that stay and are one optimizer's, as long as the session's layout is this.

    Attributes:
        groups: each one's parameters: name, parameter, index of its parameter group.
        numbers: each parameter's place among all of the optimizer's.
    """

    staying: tuple[object, ...]
    groups: Mapping[int, list[tuple[str, torch.Tensor, int]]]
    numbers: Mapping[torch.Tensor, int]


@dataclass
class ResidentUpdate:
    """The update of a group by one backward; `done` once all of it is enqueued."""

    label: str
    done: bool = False

    def has_begun(self) -> bool:
        return True

    def check(self) -> None:
        """Raise where it was interrupted.

        Raises:
            StreamError: it was.
        """
        if not self.done:
            raise interrupted(self.label)


def is_ready(optimizer: ChunkedOptimizer, session: Session, index: int) -> bool:
    """Whether the next backward may update a group where it stays: all of it is this optimizer's, has no gradients yet
    (of which another thread's may not be looked at), and the hyper-parameters make sense."""
    entries = _known(optimizer, session).groups.get(index)
    if optimizer.in_backward.accumulating or not entries or optimizer.overlap.undoable:
        return False
    if not can_update_resident(optimizer.states, optimizer.rule.num_stages):
        return False
    if not set(optimizer.rule.states(optimizer.param_groups).kinds) <= set(optimizer.states.kinds):
        return False
    others = session.store.trainers.trained_by_others()
    if others and any(name in others for name, _, _ in entries):
        return False
    if any(not parameter.requires_grad or gradient_of(parameter) is not None for _, parameter, _ in entries):
        return False
    try:
        for number in {number for _, _, number in entries}:
            optimizer.check_group(optimizer.param_groups[number])
    except OptionsError:
        return False  # the step says so
    return True


def update_group(optimizer: ChunkedOptimizer, session: Session, index: int) -> None:
    """Update a group whose gradients are complete, behind what has computed them; they are given back."""
    known = _known(optimizer, session)
    entries, made = known.groups[index], ResidentUpdate(label_of(session, index))
    optimizer.in_backward.note(session, index, (), made)  # before it begins: it may be interrupted
    session.store.tier.enqueue(_update, optimizer, session, index, entries, known.numbers, made)


def _update(
    optimizer: ChunkedOptimizer,
    session: Session,
    index: int,
    entries: list[tuple[str, torch.Tensor, int]],
    numbers: Mapping[torch.Tensor, int],
    made: ResidentUpdate,
) -> None:
    update_in_place(optimizer, [(parameter, number) for _, parameter, number in entries], NO_SCALE, numbers)
    noted = []
    for name, parameter, number in entries:
        parameter.grad = stand_in = ConsumedGradient(parameter, name)
        hyper = optimizer.hyper_now(optimizer.param_groups[number], parameter)
        noted.append(Begun(parameter, name, stand_in, stand_in._version, parameter._version, hyper))
    optimizer.in_backward.note(session, index, noted, made)
    made.done = True


def make_ready(optimizer: ChunkedOptimizer, session: Session, index: int) -> None:
    """Before a backward runs: who reads parameters has ended, and masters are of what those contain."""
    entries = _known(optimizer, session).groups[index]
    await_readers(parameter for _, parameter, _ in entries)
    for _, parameter, _ in entries:
        optimizer.contents.follow(parameter, optimizer.kept_states_of(parameter))


def _known(optimizer: ChunkedOptimizer, session: Session) -> ResidentGroups:
    """The groups that stay and are this optimizer's, looked up anew where the layout or who stays has changed."""
    staying = session.store.layout.version, session.store.resident
    known = optimizer.in_backward.staying(session)
    if known is None or known.staying != staying:
        known = _found(optimizer, session, staying)
        optimizer.in_backward.keep_resident_groups(session, known)
    return known


def _found(optimizer: ChunkedOptimizer, session: Session, staying: tuple[object, ...]) -> ResidentGroups:
    found: dict[int, list[tuple[str, torch.Tensor, int]]] = {}
    numbers: dict[torch.Tensor, int] = {}
    layout = session.store.layout
    group_of = layout.group_of()
    for index, group in enumerate(optimizer.param_groups):
        for parameter in map(local_shard_of, group["params"]):
            numbers[parameter] = len(numbers)
            other, name = owner(parameter) or (None, "")
            if other is session and (of := group_of.get(name)) in session.store.resident:
                found.setdefault(of, []).append((name, parameter, index))
    whole = {
        of: entries
        for of, entries in found.items()
        if {name for name, _, _ in entries} == {s.spec.name for s in layout.groups[of].slices}
        and all(_can_be_updated(optimizer, parameter) for _, parameter, _ in entries)
    }
    return ResidentGroups(staying, whole, numbers)


def _can_be_updated(optimizer: ChunkedOptimizer, parameter: torch.Tensor) -> bool:
    """Whether it is this optimizer that updates a parameter, and can; where it cannot, the step says why."""
    said = declared(parameter)
    if said is None or said.keeper is None or said.keeper() is not optimizer:
        return False
    try:
        check_in_place(optimizer, parameter, parameter)
    except UnsupportedError:
        return False
    return True
