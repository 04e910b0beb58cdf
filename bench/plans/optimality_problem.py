"""Convert a planned step to the bound's problem: its calls, what may be evicted, and when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from chunkc.explaining.memory_timeline import StepPlans
from chunkc.explaining.updates import Updates
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import GRAD, PARAM, Chunk
from chunkc.ir.links import TO_DEVICE, TO_HOME
from chunkc.ir.plan import Position
from chunkc.ir.states import MASTER
from chunkc.ir.updates import update_traffic
from chunkc.passes.planning.room import fixed_nbytes
from chunkc.passes.planning.update_seconds import traffic_s
from chunkc.policy.captured_step import Captured, profile
from plans.optimality_bound import Call, Gap, Problem, UpdateWork


def problem_of(
    captured: Captured, step: StepPlans, updates: Updates, hardware: Hardware, budget_nbytes: int, *, early: bool
) -> Problem:
    """A step in one graph, as the bound sees it.

    Args:
        captured: without an activation plan.
        step: as planned, in which some of it is.
        early: groups may be updated in the backward.
    """
    layout = step.layout
    positions = profile(captured, layout).passes
    num_forward, num_calls = len(captured.forward.calls), len(positions)
    nbytes = [one.non_model_nbytes + sum(layout.chunk_nbytes_of(item) for item in one.items) for one in positions]
    gaps = list(_chunk_gaps(positions, step, early))
    for gap in _saved_gaps(captured):
        gaps.append(gap)
        for at in range(gap.begin, gap.end):
            nbytes[at] -= gap.nbytes
    trained = [layout.groups[index] for index in sorted(layout.groups_of(step.trained))]
    states = tuple(
        sum(group.nbytes(kind) for kind in group.update_kinds if kind not in (PARAM, GRAD)) for group in trained
    )
    last = {item.group: at for at, one in enumerate(positions) for item in one.items}
    specs = layout.specs()
    update_nbytes = sum(
        stage.nbytes
        for spec in (specs[name] for name in step.trained)
        for stage in update_traffic(spec.dtype, spec.states, spec.numel, updates.num_stages)
    )
    rates = {link.name: link.bytes_per_s for link in hardware.links}
    return Problem(
        calls=tuple(
            Call(one.cost_s, size, again_s)
            for one, size, again_s in zip(positions, nbytes, _again_s(captured, num_calls))
        ),
        num_forward=num_forward,
        gaps=tuple(gap for gap in gaps if gap.begin != gap.end or gap.begin >= num_calls),
        update=UpdateWork(
            traffic_s(update_nbytes, hardware), states, tuple(last[group.index] for group in trained), early
        ),
        capacity_nbytes=budget_nbytes - fixed_nbytes(layout, frozenset()),
        inward=rates[TO_DEVICE],
        outward=rates[TO_HOME],
    )


def _again_s(captured: Captured, num_calls: int) -> list[float | None]:
    """Seconds that a backward takes to recompute each call, where that is less."""
    found = [None if call.recompute_call is None else call.recompute_call.cost_s for call in captured.forward.calls]
    return [*found, *[None] * (num_calls - len(found))]


def _chunk_gaps(positions: Sequence[Position], step: StepPlans, early: bool) -> Iterator[Gap]:
    """Find where chunks of parameters and of gradients may be evicted."""
    layout, num_calls = step.layout, len(positions)
    trained = layout.groups_of(step.trained)
    uses: dict[Chunk, list[int]] = {}
    for at, position in enumerate(positions):
        for item in position.items:
            uses.setdefault(item, []).append(at)
    for chunk, calls in uses.items():
        name, size = str(chunk), layout.chunk_nbytes_of(chunk)
        is_param, is_trained = chunk.kind == PARAM, chunk.group in trained
        for before, after in pairwise(calls):
            if after > before + 1:
                yield Gap(name, size, before + 1, after, is_dirty=not is_param)
        if is_param and is_trained and not early and MASTER not in layout.groups[chunk.group].update_kinds:
            yield Gap(name, size, calls[-1] + 1, num_calls, is_dirty=False)
            yield Gap(name, size, num_calls, calls[0], is_dirty=True)
        elif is_param:
            yield Gap(name, size, calls[-1] + 1, calls[0], is_dirty=is_trained)
        elif not early:
            yield Gap(name, size, calls[-1] + 1, num_calls + 1, is_dirty=True)


def _saved_gaps(captured: Captured) -> Iterator[Gap]:
    """Find where saved values may be evicted, and which call recomputes each."""
    forward, backward = captured.forward, captured.backward
    if backward is None:
        return
    storage_of = forward.value_storages
    given = set(forward.inputs.values()) | forward.held
    given |= {storage_of[value] for value in forward.outputs[: forward.num_user_outputs] if value is not None}
    maker = {storage: at for at, call in reversed(list(enumerate(forward.calls))) for storage in call.output_storages}
    used = {
        storage: max(at for at, call in enumerate(forward.calls) if storage in _touched(call, storage_of))
        for storage in maker
    }
    behind = backward.value_storages
    uses: dict[str, list[int]] = {}
    for at, call in enumerate(backward.calls):
        for storage in _touched(call, behind):
            uses.setdefault(storage, []).append(at)
    saved = forward.outputs[forward.num_user_outputs :]
    seen = set()
    for value, target in zip(saved, backward.inputs.values()):
        if value is None or (storage := storage_of[value]) in given or storage in seen or target not in uses:
            continue
        seen.add(storage)
        size, calls, offset = forward.storages[storage], uses[target], len(forward.calls)
        if calls[0] + offset > used[storage] + 1:
            yield Gap(storage, size, used[storage] + 1, offset + calls[0], is_dirty=True, recomputed=maker[storage])
        for before, after in pairwise(calls):
            if after > before + 1:
                yield Gap(storage, size, offset + before + 1, offset + after, is_dirty=False, recomputed=maker[storage])


def _touched(call: Any, storage_of: Mapping[str, str]) -> set[str]:
    return {storage_of[value] for value in (*call.inputs, *call.outputs)}
