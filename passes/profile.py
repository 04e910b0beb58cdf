"""Non-model bytes at every call of a phase: liveness over storages, inside each call and around it."""

from __future__ import annotations

from collections.abc import Mapping

from chunkc.ir.chunks import GRAD, PARAM, chunk_name
from chunkc.ir.plan import Position
from chunkc.ir.program import PhaseProgram, SegmentCall, SegmentMemory


def last_holds(program: PhaseProgram) -> dict[str, int]:
    """Storage -> index of the last call that holds it; `len(calls)` for those that are returned or held outside."""
    end = len(program.calls)
    storage_of = program.value_storages()
    last = dict.fromkeys(program.held, end)
    for index, call in enumerate(program.calls):
        for value in (*call.inputs, *call.outputs):
            last.setdefault(storage_of[value], index)
            last[storage_of[value]] = max(last[storage_of[value]], index)
    for value in program.outputs:
        if value is not None:
            last[storage_of[value]] = end
    return last


def positions(
    program: PhaseProgram,
    memories: Mapping[str, SegmentMemory],
    *,
    group_of: Mapping[str, int],
) -> tuple[Position, ...]:
    """One `Position` per call. Held storages (inputs, buffers, what the caller keeps) count at every one."""
    last = last_holds(program)
    storage_of = program.value_storages()
    live = {storage for storage in program.inputs.values() if last.get(storage, -1) >= 0} | program.held
    found = []
    for index, call in enumerate(program.calls):
        memory = memories[call.segment]
        live = {storage for storage in live if last[storage] >= index}
        nbytes, step = _peak(call, memory, program.storages, storage_of, live, last, index)
        found.append(
            Position(
                name=call.name,
                phase=program.phase,
                non_model_nbytes=nbytes,
                op=memory.steps[step].op,
                module=memory.steps[step].module or call.module,
                reads=frozenset(chunk_name(PARAM, group_of[p]) for _, p in call.parameters if p in group_of),
                writes=frozenset(chunk_name(GRAD, group_of[p]) for _, p in call.gradients if p in group_of),
                cost_s=call.cost_s,
                sunk=tuple((name, value in program.handed_over) for value, name in call.gradients),
            )
        )
        live |= set(call.output_storages)
    return tuple(found)


def _peak(
    call: SegmentCall,
    memory: SegmentMemory,
    nbytes_of: Mapping[str, int],
    storage_of: Mapping[str, str],
    live: set[str],
    last: Mapping[str, int],
    index: int,
) -> tuple[int, int]:
    """Bytes at the call's fullest step, and which step that is."""
    released: dict[str, int] = {}  # donated storage -> first step without it
    for position, value in enumerate(call.inputs):
        storage = storage_of[value]
        if last[storage] == index and storage in live:
            released[storage] = max(released.get(storage, 0), memory.input_released[position])
    around = sum(nbytes_of[storage] for storage in live if storage not in released)
    best = max(
        range(len(memory.steps)),
        key=lambda t: (
            memory.steps[t].nbytes + sum(nbytes_of[storage] for storage, step in released.items() if t < step)
        ),
    )
    inside = memory.steps[best].nbytes
    return around + inside + sum(nbytes_of[s] for s, step in released.items() if best < step), best
