"""Describe the update of a chunk group, and the optimizer as its updates see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch

from chunkc.ir.errors import StreamError
from chunkc.ir.plan import Tile
from chunkc.ir.states import StateFormat
from chunkc.optim.grad_scale import AssumedScale
from chunkc.optim.rule import Rule, Spans, TileUpdate, Updater
from chunkc.optim.split_masters import NotedContents
from chunkc.optim.states import Dtypes
from chunkc.optim.update_mode import UpdateMode
from chunkc.runtime.device.updates import HomeUpdate
from chunkc.runtime.store.shards import local_shard_of
from chunkc.runtime.store.watched_gradients import is_unused
from chunkc.session.session import Session, owner


class ParameterGroups(Protocol):
    """An optimizer as far as its parameter groups."""

    @property
    def param_groups(self) -> Any: ...

    @property
    def own_groups(self) -> Any: ...


class Accumulating(Protocol):
    """The schedule of an optimizer's updates: whether more gradients will be added to those of a backward."""

    accumulating: bool


class SteppingOptimizer(ParameterGroups, Protocol):
    """An optimizer as its updates see it. `chunkc.optim.optimizer.ChunkedOptimizer` is one."""

    rule: Rule
    states: StateFormat
    overlap: UpdateMode
    contents: NotedContents
    assumed_scale: AssumedScale

    @property
    def scheduler(self) -> Accumulating: ...

    def states_of(self, parameter: torch.Tensor) -> dict[str, Any]: ...

    def kept_states_of(self, parameter: torch.Tensor) -> dict[str, Any]: ...

    def state_on_tier(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]: ...

    def dtypes_of(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> Dtypes: ...

    def begin_states(self, state: Mapping[str, Any], kinds: Iterable[str]) -> None: ...

    def begin_update_of(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None: ...

    def hyper_at(self, group: Mapping[str, Any], step: int) -> Any: ...

    def hyper_now(self, group: Mapping[str, Any], parameter: torch.Tensor) -> Any: ...

    def next_hyper(self, parameter: torch.Tensor, at: Callable[[int], Any]) -> Any: ...

    def updater(self, device: torch.device, *, by_triton: bool | None = None) -> Updater: ...

    def lay_out(self, parameters: Iterable[torch.Tensor]) -> None: ...

    def check_group(self, group: Mapping[str, Any]) -> None: ...

    def check_dtype(self, parameter: torch.Tensor, name: str = "") -> None: ...


class Task(NamedTuple):
    """A parameter to update, its name in its session (empty: it is in none), and its parameter group."""

    parameter: torch.Tensor
    name: str
    group: Mapping[str, Any]


def tasks_of(optimizer: ParameterGroups) -> Iterator[tuple[Session | None, Task]]:
    """Iterate over an optimizer's parameters in order, each with its session.

    Of parameters that are sharded over ranks these are this rank's shards.
    """
    for group in optimizer.own_groups:
        for parameter in map(local_shard_of, group["params"]):
            session, name = owner(parameter) or (None, "")
            yield session, Task(parameter, name, group)


@dataclass(frozen=True)
class NotedParameter:
    """A parameter as it was when its update began.

    Attributes:
        data_ptr: address of its data, which tells a replacement that no version counter sees.
        states: of a staged update, each state's kind, object and version.
    """

    task: Task
    gradient: torch.Tensor
    gradient_version: int
    parameter_version: int
    data_ptr: int
    hyper: Any
    states: Sequence[tuple[str, int, int]] = ()

    @property
    def has_unused_gradient(self) -> bool:
        """Whether neither Python code nor autograd has used the gradient since; it must be watched."""
        return is_unused(self.gradient) and self.gradient._version == self.gradient_version


class Where(Enum):
    """The place of a group's update: in slots and on residents, by the device; at home, by the CPU."""

    SLOTS = "slots"
    RESIDENT = "resident"
    HOME = "home"


@dataclass(eq=False)
class UpdateTask:
    """The update of one chunk group, in an optimizer's step, or in a backward, where it is kept until that step.

    Attributes:
        group: the group's index.
        label: the group as its user knows it.
        tasks: the parameters that are updated.
        is_staged: whether it writes shadow copies, which `step()` commits or rolls back.
        spans: elements to update, once its steps are counted.
        noted: of an update in a backward, the parameters as they were when it began.
        in_slots: the update of a tile in slots.
        tiles: those that are still to come in this backward. A resident group is updated at once: all or none.
        at_home: the CPU's update in this backward.
        has_begun: whether the device's has begun in this backward: it may be interrupted before.
    """

    group: int
    label: str
    tasks: Sequence[Task]
    where: Where
    is_staged: bool = False
    spans: Spans = ()
    noted: Sequence[NotedParameter] = ()
    in_slots: TileUpdate | None = None
    tiles: set[Tile] = field(default_factory=set)
    at_home: HomeUpdate | None = None
    has_begun: bool = False

    @staticmethod
    def of(session: Session, group: int, tasks: Sequence[Task], where: Where, *, is_staged: bool = False) -> UpdateTask:
        """Describe the update of a group of a session."""
        label = f"chunk param:{group} ({session.store.layout.groups[group].title})"
        return UpdateTask(group, label, tasks, where, is_staged)

    def check_complete(self) -> None:
        """Raise if the backward did not come to the update's end. One at home that fails raises where it is awaited.

        Raises:
            StreamError: it did not.
        """
        if self.tiles:
            raise StreamError(
                f"the update of {self.label} was interrupted in the backward and is half done: load a checkpoint"
            )
