"""What an optimizer's step does to one chunk group: which runs of elements, where, and by which kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from chunkc.adam_rule import AdamRule, Place, Runs, adam_slots, clipped, update_on_cpu
from chunkc.device_adam import DeviceAdam
from chunkc.ir.chunks import GRAD, PARAM, ChunkGroup, chunk_name
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.hardware import Hardware
from chunkc.ir.plan import Tile
from chunkc.ir.states import EXP_AVG, SCALES, num_entries
from chunkc.kernels.adam_cpu import warm_up_format
from chunkc.kernels.formats import GradScale
from chunkc.optim_states import initialise
from chunkc.passes.update_placement import groups_for_cpu
from chunkc.session import Session, managing
from chunkc.update import GroupUpdate

AUTO, DEVICE, CPU = "auto", "device", "cpu"
UPDATE_ON = (AUTO, DEVICE, CPU)


class AdamLike(Protocol):
    """What a group's update asks of an optimizer: the states of its parameters, and the hyper-parameters of a step."""

    def states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """A parameter's states, without waiting for updates under way."""

    def begin_update_of(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None: ...

    def next_hyper(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Task:
    """One chunked parameter that has a gradient."""

    optimizer: AdamLike
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
    """

    chunked: dict[Session, dict[int, list[Task]]]
    in_place: list[tuple[torch.Tensor, int]]
    changing: list[torch.Tensor]


def due_of(optimizer: Any) -> Due:
    """What the optimizer's step changes now.

    Raises:
        UnsupportedError: a gradient is sparse.
    """
    due = Due({}, [], [])
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise UnsupportedError(f"{type(optimizer).__name__} does not support sparse gradients")
            due.changing.append(parameter)
            home = managing(parameter)
            if home is None:
                due.in_place.append((parameter, index))
                continue
            session, name = home
            by_group = due.chunked.setdefault(session, {})
            task = Task(optimizer, parameter, name, group)
            by_group.setdefault(session.store.group_index(name), []).append(task)
    return due


def groups_at_home(session: Session, groups: Sequence[int], update_on: str, num_stages: int = 1) -> frozenset[int]:
    """Those of the groups that the CPU updates where they are at home (see `divided`)."""
    layout = session.store.layout
    return divided(
        [layout.groups[index] for index in groups],
        update_on,
        home=session.options.home,
        on_cuda=session.device.type != "cpu",
        hardware=session.hardware,
        num_stages=num_stages,
    )


def divided(
    groups: Sequence[ChunkGroup], update_on: str, *, home: str, on_cuda: bool, hardware: Hardware, num_stages: int = 1
) -> frozenset[int]:
    """Those of the groups that the CPU updates where they are at home.

    With "auto", a model on a CUDA device divides them by cost. On the CPU the budget stands for a device's memory, so
    "auto" updates in slots.

    Raises:
        OptionsError: `update_on` is "cpu", but some of a group's data is on a disk.
    """
    if update_on == DEVICE or (update_on == AUTO and not on_cuda):
        return frozenset()
    if home != "cpu":
        if update_on == CPU:
            raise OptionsError(
                f'update_on="cpu" updates memory where it is, and home is {home!r}; use home="cpu", or '
                'update_on="device"'
            )
        return frozenset()
    everything = frozenset(group.index for group in groups)
    return everything if update_on == CPU else groups_for_cpu(groups, hardware, num_stages)


def runs_of(session: Session, index: int, tasks: Sequence[Task], *, merged: bool = True) -> Sequence[Any]:
    """The group's elements to update, by tensor, or neighbours with equal hyper-parameters as one run.

    Counts their steps. States that are missing are made: home views of zeros, and of the parameter for a master.
    """
    store = session.store
    chunk_group = store.layout.groups[index]
    kinds = chunk_group.state_kinds
    quantised = SCALES[0] in kinds
    hypers: dict[str, Any] = {}
    for task in tasks:
        state = task.optimizer.states_of(task.parameter)
        task_kinds = {kind: store.home_view(kind, task.name) for kind in kinds}
        fresh = EXP_AVG not in state
        for kind, view in task_kinds.items():
            if fresh:
                initialise(kind, view, task.parameter)
            elif state[kind].data_ptr() != view.data_ptr():
                view.copy_(state[kind])
            else:
                continue
            state[kind] = view
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        task.optimizer.begin_update_of(task.parameter, state)
        hypers[task.name] = task.optimizer.next_hyper(task.parameter, task.group)
    runs: list[tuple[int, int, Any]] = []
    follows = False
    for tensor_slice in chunk_group.slices:
        hyper = hypers.get(tensor_slice.spec.name)
        if hyper is None:
            follows = False
            continue
        # Between tensors may be bytes that nobody wrote: they may not get into the scale of a tensor's last block.
        touches = not quantised or (follows and runs[-1][1] == tensor_slice.offset)
        if merged and follows and touches and runs[-1][2] == hyper:
            runs[-1] = (runs[-1][0], tensor_slice.end, hyper)
        else:
            runs.append((tensor_slice.offset, tensor_slice.end, hyper))
        follows = True
    return runs


def update_in_slots(
    rule: AdamRule, index: int, runs: Runs, device_adam: DeviceAdam | None, scale: GradScale
) -> GroupUpdate:
    """The update of one group tile by tile: by Triton with a `DeviceAdam`, else on the CPU."""

    def update(slots: Mapping[str, torch.Tensor], tile: Tile) -> None:
        part, place = clipped(runs, tile.begin, tile.end), Place(index, tile.begin)
        if device_adam is not None:
            device_adam.update(rule, adam_slots(slots), part, scale, place)
        else:
            update_on_cpu(rule, adam_slots(slots), part, scale, place)

    return GroupUpdate(index, update)


def update_at_home(rule: AdamRule, session: Session, index: int, runs: Runs, scale: GradScale) -> Callable[[], None]:
    """The update of a group in home memory, by the CPU; home must be as all computation leaves it when it runs."""
    return partial(update_on_cpu, rule, adam_slots(flat_home(session, index)), runs, scale, Place(index, 0))


def compile_for_home(rule: AdamRule, session: Session, index: int, runs: Runs, scale: GradScale) -> None:
    """Compile whatever kernels that update may run."""
    group = session.store.layout.groups[index]
    fmt = rule.format(group.kind_dtype(PARAM), group.kind_dtype(GRAD))
    for l2 in {not hyper.decoupled and hyper.weight_decay != 0 for _, _, hyper in runs}:
        warm_up_format(fmt, l2=l2, scaled=scale.unscale is not None or scale.clip is not None)


def flat_home(session: Session, index: int) -> dict[str, torch.Tensor]:
    """All that an update of a group needs, as flat tensors over home memory."""
    arena, group = session.store.arena, session.store.layout.groups[index]
    flat: dict[str, torch.Tensor] = {}
    for kind in group.update_kinds:
        view = arena.host_view(chunk_name(kind, index), group.kind_dtype(kind), num_entries(kind, group.numel))
        assert view is not None, "only a home in RAM is updated in place"
        flat[kind] = view
    return flat
