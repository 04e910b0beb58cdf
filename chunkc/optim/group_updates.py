"""Update one chunk group, or parameters outside of chunks, by an optimizer's rule.

A group is updated in slots, tile by tile (`update_tile`), or in home memory by the CPU (`home_update`); parameters that
do not move are updated in place (`update_in_place`). States that are missing are made on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from chunkc.ir.layout import GRAD, Chunk
from chunkc.ir.plan import Tile
from chunkc.ir.states import MASTER, is_scale, num_entries
from chunkc.ir.updates import update_stages
from chunkc.kernels.formats import GradScale
from chunkc.optim.grad_scale import is_skipped, on_the_cpu
from chunkc.optim.over_ranks import sums_of_group
from chunkc.optim.rule import GroupWork, ResidentTensor, Spans, TileUpdate
from chunkc.optim.states import initialise
from chunkc.optim.stepping import SteppingOptimizer
from chunkc.optim.update_task import Task, UpdateTask
from chunkc.runtime.store.shards import local_shards_in
from chunkc.runtime.store.store import ChunkStore
from chunkc.session.session import Session

_CPU = torch.device("cpu")


def spans_of(optimizer: SteppingOptimizer, session: Session, update: UpdateTask) -> Spans:
    """Begin the update of a group: make missing states, count steps, and return the spans of elements to update.

    Neighbours with equal hyperparameters are one span, unless the rule takes norms of whole tensors. Of a staged update
    all states are there, and parameters and step counters change once it is committed.
    """
    chunk_group, merged = session.store.layout.groups[update.group], optimizer.rule.num_stages == 1
    quantised, counted = any(map(is_scale, chunk_group.state_kinds)), not update.is_staged
    if counted:
        make_states(optimizer, session, update.group, update.tasks)
    hypers: dict[str, Any] = {}
    for task in update.tasks:
        state, hyper_at = optimizer.states_of(task.parameter), partial(optimizer.hyper_at, task.group)
        if counted:
            optimizer.begin_update_of(task.parameter, state)
            hypers[task.name] = optimizer.next_hyper(task.parameter, hyper_at)
        else:
            hypers[task.name] = hyper_at(int(state["step"]) + 1)
    spans: list[tuple[int, int, Any]] = []
    follows = False
    for tensor_slice in chunk_group.slices:
        hyper = hypers.get(tensor_slice.spec.name)
        if hyper is None:
            follows = False
            continue
        # Padding between tensors is never written: it must not get into the scale of a tensor's last block.
        touches = not quantised or (follows and spans[-1][1] == tensor_slice.offset)
        if merged and follows and touches and spans[-1][2] == hyper:
            spans[-1] = (spans[-1][0], tensor_slice.end, hyper)
        else:
            spans.append((tensor_slice.offset, tensor_slice.end, hyper))
        follows = True
    return spans


def make_states(optimizer: SteppingOptimizer, session: Session, index: int, tasks: Sequence[Task]) -> None:
    """Make the states that parameters of a group lack: home views of zeros, or of the parameter for a master."""
    store = session.store
    kinds = store.layout.groups[index].state_kinds
    zeros = {kind for kind in kinds if store.arena.is_zero(Chunk(kind, index))}
    for task in tasks:
        state = optimizer.states_of(task.parameter)
        needed = optimizer.dtypes_of(task.parameter, task.group)
        optimizer.begin_states(state, needed)
        fresh = not any(kind in state for kind in kinds)
        for kind in kinds:
            former = state.get(kind)
            if kind not in needed or (former is not None and store.views.is_home_view(former, kind, task.name)):
                continue
            view = store.views.home_view(kind, task.name)
            if former is not None:
                store.write(kind, task.name, former)
            elif not fresh or kind == MASTER or kind not in zeros:  # zeros need not be written again over a link
                initialise(kind, view, task.parameter)
            state[kind] = view
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")


def flat_home(session: Session, index: int) -> dict[str, torch.Tensor]:
    """Return all that an update of a group needs, by kind, as flat tensors over home memory."""
    arena, group = session.store.arena, session.store.layout.groups[index]
    return {
        kind: arena.host_view(Chunk(kind, index), group.kind_dtype(kind), num_entries(kind, group.numel))
        for kind in group.update_kinds
    }


def home_update(
    optimizer: SteppingOptimizer, session: Session, task: UpdateTask, scale: GradScale
) -> Callable[[], None]:
    """Return the update of a group in home memory, by the CPU; home must be as all computation leaves it when it runs.

    It runs on any thread: what it needs is compiled here, since Inductor may not be safe on others. A staged one writes
    to shadow copies, and leaves home as it is.
    """
    store, index, num_stages = session.store, task.group, optimizer.rule.num_stages
    numel, home = store.layout.groups[index].numel, flat_home(session, index)
    updater = optimizer.updater(_CPU, by_triton=False)
    updater.compile_ahead(home, task.spans, scale)
    update = updater.of_group(_work(optimizer, store, task, [(0, numel)], scale))
    shadows = store.shadow_copies.flat(store.layout, index, [k for k in home if k != GRAD]) if task.is_staged else {}
    flats = home | shadows

    def run() -> None:
        for kind, shadow in shadows.items():
            shadow.copy_(home[kind])
        for stage in range(num_stages):
            update(flats, Tile(index, 0, numel, stage, num_stages))

    return run


def slot_update(
    optimizer: SteppingOptimizer, store: ChunkStore, task: UpdateTask, tiles: Iterable[Tile], scale: GradScale
) -> TileUpdate:
    """Return the update of a group in slots, tile by tile, for `update_tile`."""
    ranges = [(tile.begin, tile.end) for tile in tiles if tile.stage == 0]
    return optimizer.updater(store.tier.device).of_group(_work(optimizer, store, task, ranges, scale))


def _work(
    optimizer: SteppingOptimizer,
    store: ChunkStore,
    task: UpdateTask,
    ranges: Sequence[tuple[int, int]],
    scale: GradScale,
) -> GroupWork:
    sums = sums_of_group(store, task.group) if optimizer.rule.num_stages > 1 else None
    return GroupWork(task.group, task.spans, ranges, scale, sums)


def update_tile(store: ChunkStore, update: TileUpdate, tile: Tile, *, whole: Sequence[str] = ()) -> None:
    """Update one tile in slots; those of the kinds in `whole` hold the whole chunk."""
    stage = update_stages(store.layout.groups[tile.group].update_kinds, tile.num_stages)[tile.stage]
    elements = (tile.begin, tile.end)
    chunks = {kind: Chunk(kind, tile.group, None if kind in whole else elements) for kind in stage.kinds}
    slots: dict[str, torch.Tensor] = {}
    for kind, chunk in chunks.items():
        slot = store.slots.begin_compute(chunk)
        slots[kind] = slot[tile.begin : tile.end] if kind in whole else slot
    store.tier.enqueue(update, slots, tile)
    for kind, chunk in chunks.items():
        store.slots.end_compute(chunk, wrote=kind in stage.writes)


def update_in_place(
    optimizer: SteppingOptimizer,
    tasks: Sequence[Task],
    scale: GradScale,
    numbers: Mapping[torch.Tensor, int] | None = None,
) -> None:
    """Update parameters that do not move.

    Args:
        numbers: each parameter's index among all of the optimizer's; None: looked up.
    """
    states = [optimizer.state_on_tier(task.parameter, task.group) for task in tasks]
    if numbers is None:
        numbers = {parameter: number for number, parameter in enumerate(local_shards_in(optimizer.param_groups))}
    hypers: dict[tuple[int, int], Any] = {}

    def hyper_at(group: Mapping[str, Any], step: int) -> Any:
        key = id(group), step
        if key not in hypers:
            hypers[key] = optimizer.hyper_at(group, step)
        return hypers[key]

    def tensors_on(device: torch.device) -> Iterator[ResidentTensor]:
        for task, state in zip(tasks, states, strict=True):
            parameter = task.parameter
            if parameter.device == device:
                hyper = optimizer.next_hyper(parameter, partial(hyper_at, task.group))
                if parameter.numel() == 0 and optimizer.rule.num_stages == 1:  # fewer rows than there are ranks
                    continue
                kinds = {kind: value for kind, value in state.items() if kind != "step"}
                yield ResidentTensor(parameter, hyper, kinds, numbers[parameter])

    for device in dict.fromkeys(task.parameter.device for task in tasks):
        tensors, scale_there = tensors_on(device), on_the_cpu(scale) if device == _CPU else scale
        if is_skipped(scale_there):
            list(tensors)  # the step is counted, and corrected with those of the device (see `pending_steps`)
        else:
            optimizer.updater(device).of_tensors(tensors, scale_there)
