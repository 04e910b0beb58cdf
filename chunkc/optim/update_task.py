"""Describe the update of a chunk group, and its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from chunkc.ir.errors import StreamError
from chunkc.ir.plan import Tile
from chunkc.optim.rule import Spans, TileUpdate
from chunkc.runtime.device.updates import HomeUpdate
from chunkc.runtime.store.watched_gradients import is_unused
from chunkc.session.session import Session


class Task(NamedTuple):
    """A parameter to update, its name in its session (empty: it is in none), and its parameter group."""

    parameter: torch.Tensor
    name: str
    group: Mapping[str, Any]


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
        at_home: the CPU's update, once it is ready to run.
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
