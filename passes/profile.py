"""Non-model bytes at every call of a phase: liveness over storages, inside each call and around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from chunkc.ir.chunks import GRAD, PARAM, Chunk
from chunkc.ir.plan import Position
from chunkc.ir.program import BACKWARD, FORWARD, PhaseProgram, SegmentMemory


def last_holds(program: PhaseProgram) -> dict[str, int]:
    """Storage -> index of the last call that holds it; `len(calls)` for those that are returned or held outside."""
    end = len(program.calls)
    storage_of = program.value_storages()
    last = dict.fromkeys(program.held, end)
    for index, call in enumerate(program.calls):
        for value in (*call.inputs, *call.outputs):
            last.setdefault(storage_of[value], index)
            last[storage_of[value]] = max(last[storage_of[value]], index)
    for result in program.outputs:
        if result is not None:
            last[storage_of[result]] = end
    return last


@dataclass(frozen=True)
class CallStep:
    """Non-model bytes while one operation of a call runs.

    `around`: storages that are held outside the call, by name; what the call itself has allocated is `inside_nbytes`.
    `source`: the user's line, `file.py:12, code`; may be empty.
    """

    op: str
    module: str
    source: str
    around: frozenset[str]
    around_nbytes: int
    inside_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.around_nbytes + self.inside_nbytes


def call_steps(program: PhaseProgram, memories: Mapping[str, SegmentMemory]) -> Iterator[tuple[CallStep, ...]]:
    """For each call the bytes at every one of its operations.

    Held storages (inputs, buffers, what the caller keeps) count throughout; a value that nobody needs after the call
    is given up inside it, at the operation that lets it go. A storage that is copied home is held to the end of the
    forward's last call that holds it, and in the backward from its first call on; one that is dropped and made again,
    from the call that makes it.
    """
    last = last_holds(program)
    storage_of = program.value_storages()
    nbytes_of = program.storages
    live = {storage for storage in program.inputs.values() if last.get(storage, -1) >= 0} | program.held
    live -= program.copied.keys() | program.remade.keys()
    for index, call in enumerate(program.calls):
        memory = memories[call.segment]
        live = {storage for storage in live if last[storage] >= index}
        if program.copied and program.phase == BACKWARD:
            live |= program.copied.keys() & {storage_of[value] for value in call.inputs}
        released: dict[str, int] = {}  # donated storage -> first step without it
        for position, value in enumerate(call.inputs):
            storage = storage_of[value]
            if program.phase == FORWARD and storage in program.copied:
                continue
            if last[storage] == index and storage in live:
                released[storage] = max(released.get(storage, 0), memory.input_released[position])
        kept = frozenset(live.difference(released))
        kept_nbytes = sum(nbytes_of[storage] for storage in kept)
        steps = []
        for at, step in enumerate(memory.steps):
            donated = [storage for storage, gone in released.items() if at < gone]
            around = kept.union(donated) if donated else kept
            around_nbytes = kept_nbytes + sum(nbytes_of[storage] for storage in donated)
            origin = call.origin(step)
            module = origin.module or call.module
            steps.append(CallStep(step.op, module, origin.source, around, around_nbytes, step.nbytes))
        yield tuple(steps)
        live |= set(call.output_storages)


def left_nbytes(program: PhaseProgram) -> list[int]:
    """Non-model bytes that are alive once each call is over and its gradients are sunk."""
    last, storage_of = last_holds(program), program.value_storages()
    live = (set(program.inputs.values()) | program.held) - program.copied.keys() - program.remade.keys()
    found = []
    for index, call in enumerate(program.calls):
        live |= {storage_of[value] for value in (*call.inputs, *call.outputs)}
        live = {storage for storage in live if last.get(storage, -1) > index}
        found.append(sum(program.storages[storage] for storage in live))
    return found


def positions(
    program: PhaseProgram,
    memories: Mapping[str, SegmentMemory],
    *,
    group_of: Mapping[str, int],
) -> tuple[Position, ...]:
    """One `Position` per call, with the bytes of its fullest operation."""
    found = []
    for call, steps, left in zip(program.calls, call_steps(program, memories), left_nbytes(program)):
        peak = max(steps, key=lambda step: step.nbytes)
        found.append(
            Position(
                name=call.name,
                phase=program.phase,
                non_model_nbytes=peak.nbytes,
                op=peak.op,
                module=peak.module,
                reads=frozenset(Chunk(PARAM, group_of[p]) for _, p in call.parameters if p in group_of),
                writes=frozenset(Chunk(GRAD, group_of[p]) for _, p in call.gradients if p in group_of),
                cost_s=call.cost_s,
                sunk=tuple((name, value in program.handed_over) for value, name in call.gradients),
                left_nbytes=left,
            )
        )
    return tuple(found)
