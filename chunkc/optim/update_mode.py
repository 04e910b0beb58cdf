"""Define the arguments `overlap`, `update_on` and `undoable`: when and where an optimizer's updates run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from chunkc.ir.errors import OptionsError
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import PARAM, ChunkGroup, ChunkLayout
from chunkc.passes.planning.residency import evenly_spread
from chunkc.passes.planning.update_placement import groups_for_cpu
from chunkc.policy.host_memory import home_nbytes, with_room_for_copies
from chunkc.policy.state import EMPTY_CONTEXT, PhaseContext

AUTO = "auto"

NONE, FORWARD, BACKWARD, BOTH = "none", "forward", "backward", "both"
OVERLAP = (AUTO, NONE, FORWARD, BACKWARD, BOTH)

DEVICE, CPU = "device", "cpu"
UPDATE_ON = (AUTO, DEVICE, CPU)


@dataclass(frozen=True)
class UpdateMode:
    """Arguments of an optimizer that say when and where its updates run.

    Attributes:
        mode: one of `OVERLAP`: the phases that updates may run during, in addition to `step()`. With "auto" each
            model has a mode of its own (see `resolved`).
        update_on: one of `UPDATE_ON`: where the optimizer updates chunks.
        undoable: whether `step()` can undo what the backward has updated (see `update_scheduler`).
        backward_groups: chunk groups that a backward may update, by index; None: all.

    Raises:
        OptionsError: an argument has no such value, no update by the CPU could go on after `step()`, or no update in
            the backward could be undone.
    """

    mode: str = NONE
    update_on: str = DEVICE
    undoable: bool = False
    backward_groups: frozenset[int] | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (("update_on", self.update_on, UPDATE_ON), ("overlap", self.mode, OVERLAP)):
            if value not in allowed:
                words = ", ".join(f'"{word}"' for word in allowed)
                raise OptionsError(f"{name} is {value!r}; allowed: {words}")
        if self.in_forward and self.update_on == DEVICE:
            raise OptionsError(
                f'overlap={self.mode!r} is for updates by the CPU: use update_on="{CPU}" or "auto", or '
                f'overlap="{BACKWARD}"'
            )
        if self.undoable and not self.in_backward:
            raise OptionsError(
                f'undoable=True is for updates in the backward: use overlap="{BACKWARD}" or "{BOTH}", not {self.mode!r}'
            )

    @property
    def in_forward(self) -> bool:
        """Whether updates may go on after `step()`, during the next forward."""
        return self.mode in (FORWARD, BOTH)

    @property
    def in_backward(self) -> bool:
        """Whether updates begin in the backward, before `step()`."""
        return self.mode in (BACKWARD, BOTH)

    @property
    def may_undo(self) -> bool:
        """Whether there may be updates in a backward that `step()` can undo."""
        return self.undoable or self.mode == AUTO

    @property
    def is_final(self) -> bool:
        """Whether an update in the backward cannot be undone, and consumes its gradients."""
        return self.in_backward and not self.undoable

    def updates_residents(self, num_stages: int) -> bool:
        """Whether the backward updates resident groups, and so consumes their gradients."""
        return self.is_final and num_stages == 1

    def at_home(
        self, groups: Sequence[ChunkGroup], hardware: Hardware, *, home: str, num_stages: int = 1
    ) -> frozenset[int]:
        """Return the indices of those groups that the CPU updates in home memory, if they are not resident.

        With "auto", a model on a CUDA device divides its groups by cost. On the CPU, where the budget stands for a
        device's memory, "auto" updates in slots.

        Raises:
            OptionsError: `update_on` is "cpu", but some of a group's data is on a disk.
        """
        if self.update_on == DEVICE or (self.update_on == AUTO and hardware.kind != "cuda"):
            return frozenset()
        if home != "cpu":
            if self.update_on == CPU:
                raise OptionsError(
                    f'update_on="cpu" updates memory where it is, and home is {home!r}; use home="cpu", or '
                    'update_on="device"'
                )
            return frozenset()
        everything = frozenset(group.index for group in groups)
        return everything if self.update_on == CPU else groups_for_cpu(groups, hardware, num_stages)

    def consumed(self, groups: Sequence[ChunkGroup], num_stages: int) -> frozenset[int]:
        """Return the indices of those groups with gradients that a backward consumes if they are resident."""
        return frozenset(group.index for group in groups) if self.updates_residents(num_stages) else frozenset()

    def expected(self, groups: Sequence[ChunkGroup], hardware: Hardware, *, home: str, num_stages: int) -> PhaseContext:
        """Predict the context of calls of graphs with these groups: those in slots, and `transient` ones if resident.

        Raises:
            OptionsError: as `at_home`.
        """
        if not self.in_backward:
            return EMPTY_CONTEXT
        in_slots = self.in_slots(groups, hardware, home=home, num_stages=num_stages)
        transient = self.consumed(groups, num_stages)
        updates = tuple((group, num_stages) for group in sorted(in_slots | transient))
        return PhaseContext(updates=updates, undoable=in_slots if self.undoable else frozenset(), transient=transient)

    def in_slots(
        self, groups: Sequence[ChunkGroup], hardware: Hardware, *, home: str, num_stages: int
    ) -> frozenset[int]:
        """Return those of the groups that a backward updates in slots, if they are not resident.

        Raises:
            OptionsError: as `at_home`.
        """
        moving = self.of_backward(group.index for group in groups)
        return moving - self.at_home(groups, hardware, home=home, num_stages=num_stages)

    def shadow_copied(self, layout: ChunkLayout, resident: frozenset[int]) -> frozenset[int]:
        """Return the groups of a layout that have shadow copies, so that their updates can be undone."""
        groups = self.of_backward(group.index for group in layout.trainable_groups)
        return groups - resident if self.undoable else frozenset()

    def of_backward(self, groups: Iterable[int]) -> frozenset[int]:
        """Return those of some groups that a backward may update: all, or those of `backward_groups`."""
        return frozenset(groups) if self.backward_groups is None else self.backward_groups.intersection(groups)


def resolved(
    mode: UpdateMode, layout: ChunkLayout, hardware: Hardware, *, num_stages: int, over_ranks: bool
) -> UpdateMode:
    """Return the mode of a model's updates: `overlap="auto"` becomes "backward", so that all can be undone, or "none".

    The backward updates if a GPU computes and updates, one process trains the model, and its parameters have homes in
    the host's memory. Shadow copies get half of what homes leave there; the other half is for saved values, for batches
    and for the system. Groups without room for theirs are updated by `step()`. A model with homes that the host does
    not even have room for once is planned for a host that has, and so is one on a machine that does not state its
    memory. Disks are taken to have room.
    """
    if mode.mode != AUTO:
        return mode
    is_alone = hardware.kind == "cuda" and not over_ranks
    if not is_alone or layout.is_on_disk(PARAM) or mode.update_on != DEVICE or num_stages != 1:
        return replace(mode, mode=NONE)
    left_nbytes: float = math.inf
    if hardware.host_memory_nbytes is not None:
        left_nbytes = hardware.host_memory_nbytes - home_nbytes(layout, frozenset(), counts=layout.is_in_ram)
    likely_residents_last = reversed(evenly_spread(group.index for group in layout.trainable_groups))
    groups = with_room_for_copies(layout, likely_residents_last, left_nbytes / 2 if left_nbytes >= 0 else math.inf)
    if not groups:
        return replace(mode, mode=NONE)
    is_every = len(groups) == len(layout.trainable_groups)
    return replace(mode, mode=BACKWARD, undoable=True, backward_groups=None if is_every else groups)
