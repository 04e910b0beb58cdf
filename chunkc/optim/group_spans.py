"""What of a chunk group a step changes: spans of elements with their hyper-parameters, states made on the way.

For every rule: its updater (see `rule`) says how the spans are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from chunkc.ir.layout import Chunk
from chunkc.ir.states import MASTER, is_scale, num_entries
from chunkc.optim.memory_checks import aliased_by_gradients, check_in_place, check_memory
from chunkc.optim.states import Dtypes, initialise
from chunkc.runtime.store.consumed_gradients import gradient_of
from chunkc.runtime.store.shards import local_shard_of
from chunkc.session.session import Session, managing


class Stepping(Protocol):
    """What a group's update asks of an optimizer: the states of its parameters, and the hyper-parameters of a step."""

    def states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """A parameter's states, without waiting for updates under way."""

    def dtypes_of(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> Dtypes:
        """The kinds of states that an update needs or finds, with their dtypes."""

    def begin_states(self, state: Mapping[str, Any], kinds: Iterable[str]) -> None: ...

    def begin_update_of(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None: ...

    def hyper_at(self, group: Mapping[str, Any], step: int) -> Any: ...

    def next_hyper(self, parameter: torch.Tensor, at: Callable[[int], Any]) -> Any: ...


@dataclass(frozen=True)
class Task:
    """One chunked parameter that has a gradient."""

    optimizer: Stepping
    parameter: torch.Tensor
    name: str
    group: Mapping[str, Any]


@dataclass(frozen=True)
class Due:
    """What a step changes: parameters that have a gradient.

    Attributes:
        chunked: those at home, by session and chunk group.
        in_place: the others, each with the index of its parameter group.
        changing: all.
        aliased: those of all whose gradient is their own memory, with their parameter groups.
    """

    chunked: dict[Session, dict[int, list[Task]]]
    in_place: list[tuple[torch.Tensor, int]]
    changing: list[torch.Tensor]
    aliased: list[tuple[torch.Tensor, Mapping[str, Any]]]


def due_of(optimizer: Any) -> Due:
    """What the optimizer's step changes now.

    Raises:
        OptionsError, UnsupportedError: a parameter has a dtype that no update takes, or it or a gradient lies in
            memory in a way that none can follow.
    """
    due = Due({}, [], [], [])
    checked: set[torch.dtype] = set()
    for index, group in enumerate(optimizer.param_groups):
        for parameter in map(local_shard_of, group["params"]):
            if parameter.grad is None:
                continue
            check_memory(optimizer, parameter, parameter.grad)
            if parameter.dtype not in checked:  # it may have been frozen when the optimizer was made
                optimizer.check_dtype(parameter)
                checked.add(parameter.dtype)
            due.changing.append(parameter)
            home = managing(parameter)
            if home is None:
                if gradient_of(parameter) is not None:
                    check_in_place(optimizer, parameter, parameter.grad)
                due.in_place.append((parameter, index))
                continue
            session, name = home
            by_group = due.chunked.setdefault(session, {})
            task = Task(optimizer, parameter, name, group)
            by_group.setdefault(session.store.group_index(name), []).append(task)
    aliased = set(map(id, aliased_by_gradients(optimizer, due.changing)))
    if aliased:
        due.aliased.extend(
            (p, group)
            for group in optimizer.param_groups
            for p in map(local_shard_of, group["params"])
            if id(p) in aliased
        )
    return due


def spans_of(session: Session, index: int, tasks: Sequence[Task], *, merged: bool = True) -> Sequence[Any]:
    """The group's elements to update, by tensor, or neighbours with equal hyper-parameters as one span.

    Counts their steps. States that are missing are made: home views of zeros, and of the parameter for a master.
    """
    chunk_group = session.store.layout.groups[index]
    quantised = any(map(is_scale, chunk_group.state_kinds))
    make_states(session, index, tasks)
    hypers: dict[str, Any] = {}
    for task in tasks:
        state = task.optimizer.states_of(task.parameter)
        task.optimizer.begin_update_of(task.parameter, state)
        hypers[task.name] = task.optimizer.next_hyper(task.parameter, partial(task.optimizer.hyper_at, task.group))
    spans: list[tuple[int, int, Any]] = []
    follows = False
    for tensor_slice in chunk_group.slices:
        hyper = hypers.get(tensor_slice.spec.name)
        if hyper is None:
            follows = False
            continue
        # Between tensors may be bytes that nobody wrote: they may not get into the scale of a tensor's last block.
        touches = not quantised or (follows and spans[-1][1] == tensor_slice.offset)
        if merged and follows and touches and spans[-1][2] == hyper:
            spans[-1] = (spans[-1][0], tensor_slice.end, hyper)
        else:
            spans.append((tensor_slice.offset, tensor_slice.end, hyper))
        follows = True
    return spans


def make_states(session: Session, index: int, tasks: Sequence[Task]) -> None:
    """Make the states that these parameters of a group lack: home views of zeros, and of the parameter for a master."""
    store = session.store
    kinds = store.layout.groups[index].state_kinds
    zeros = {kind for kind in kinds if store.arena.is_zero(Chunk(kind, index))}
    for task in tasks:
        state = task.optimizer.states_of(task.parameter)
        needed = task.optimizer.dtypes_of(task.parameter, task.group)
        task.optimizer.begin_states(state, needed)
        fresh = not any(kind in state for kind in kinds)
        for kind in kinds:
            former = state.get(kind)
            if kind not in needed or (former is not None and store.is_home_view(former, kind, task.name)):
                continue
            view = store.home_view(kind, task.name)
            if former is not None:
                store.write(kind, task.name, former)
            elif (
                not fresh or kind == MASTER or kind not in zeros
            ):  # zeros that are there need not be written over a link
                initialise(kind, view, task.parameter)
            state[kind] = view
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")


def flat_home(session: Session, index: int) -> dict[str, torch.Tensor]:
    """All that an update of a group needs, as flat tensors over home memory."""
    arena, group = session.store.arena, session.store.layout.groups[index]
    return {
        kind: arena.host_view(Chunk(kind, index), group.kind_dtype(kind), num_entries(kind, group.numel))
        for kind in group.update_kinds
    }
