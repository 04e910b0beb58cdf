"""Non-model bytes at every call of a phase: liveness over storages, inside each call and around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import accumulate

from chunkc.ir.layout import GRAD, Chunk
from chunkc.ir.plan import Position
from chunkc.ir.program import BACKWARD, FORWARD, MemoryStep, PhaseProgram, SegmentCall, SegmentMemory


def last_holds(program: PhaseProgram) -> dict[str, int]:
    """Storage -> index of the last call that holds it; `len(calls)` for those that are returned or held outside."""
    end = len(program.calls)
    storage_of = program.value_storages
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
    external_nbytes: int
    inside_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.external_nbytes + self.inside_nbytes


@dataclass(frozen=True)
class _Life:
    """The storages that are alive around one call.

    Attributes:
        live: storages that are held as it begins; only valid until the next call is asked for.
        released: those of them that it lets go of inside -> the first of its operations without it.
        kept_nbytes: bytes of the others.
        storing_nbytes: bytes alive as its gradients are copied to their places; 0 where copying takes no bytes of its
            own.
        left_nbytes: bytes alive once the call is over and its gradients are sunk.
    """

    call: SegmentCall
    memory: SegmentMemory
    live: Set[str]
    released: Mapping[str, int]
    kept_nbytes: int
    storing_nbytes: int
    left_nbytes: int


def _lives(program: PhaseProgram, memories: Mapping[str, SegmentMemory]) -> Iterator[_Life]:
    """Find the storages alive around each call; see `call_steps`."""
    last, storage_of, nbytes_of = last_holds(program), program.value_storages, program.storages
    going: dict[int, list[str]] = {}
    for storage, at in last.items():
        going.setdefault(at, []).append(storage)
    live = {storage for storage in program.inputs.values() if last.get(storage, -1) >= 0} | program.held
    live -= program.copied.keys() | program.remade.keys()
    live_nbytes = sum(nbytes_of[storage] for storage in live)
    for index, call in enumerate(program.calls):
        memory, read = memories[call.segment], [storage_of[value] for value in call.inputs]
        if program.phase == BACKWARD:
            back = program.copied.keys() & set(read) - live
            live_nbytes += sum(nbytes_of[storage] for storage in back)
            live |= back
        released: dict[str, int] = {}
        for position, storage in enumerate(read):
            stays = last[storage] != index or (program.phase == FORWARD and storage in program.copied)
            if not stays and storage in live:
                released[storage] = max(released.get(storage, 0), memory.input_released[position])
        gone = [storage for storage in going.get(index, ()) if storage in live]
        made = {storage for storage in call.output_storages if storage not in live}
        kept_nbytes = live_nbytes - sum(nbytes_of[storage] for storage in released)
        storing_nbytes = 0
        if block_nbytes := max((program.copy_blocks.get(value, 0) for value, _ in call.gradients), default=0):
            sources = made | {storage_of[value] for value, _ in call.gradients} & released.keys()
            storing_nbytes = kept_nbytes + sum(nbytes_of[storage] for storage in sources) + block_nbytes
        live_nbytes += sum(nbytes_of[storage] for storage in made if last[storage] > index)
        live_nbytes -= sum(nbytes_of[storage] for storage in gone)
        yield _Life(call, memory, live, released, kept_nbytes, storing_nbytes, live_nbytes)
        live |= made
        live.difference_update(going.get(index, ()))


def call_steps(program: PhaseProgram, memories: Mapping[str, SegmentMemory]) -> Iterator[tuple[CallStep, ...]]:
    """Count the bytes at every operation of each call.

    Storages held by the caller (inputs, buffers, outputs that it keeps) count throughout; a value that is not needed
    after the call is given up inside it, at the operation that lets it go. A storage that is copied home is held to the
    end of the forward's last call that holds it, and in the backward from its first call on; one that is dropped and
    made again, from the call that makes it.
    """
    nbytes_of = program.storages
    for life in _lives(program, memories):
        kept, call = frozenset(life.live - life.released.keys()), life.call
        steps = []
        for at, step in enumerate(life.memory.steps):
            donated = [storage for storage, gone in life.released.items() if at < gone]
            around = kept.union(donated) if donated else kept
            external_nbytes = life.kept_nbytes + sum(nbytes_of[storage] for storage in donated)
            origin = call.origin(step)
            module = origin.module or call.module
            steps.append(CallStep(step.op, module, origin.source, around, external_nbytes, step.nbytes))
        yield tuple(steps)


Released = tuple[tuple[int, int], ...]
"""(index of the first operation without it, bytes) of each storage that a call frees inside."""


def _fullest(memory: SegmentMemory, released: Released) -> tuple[int, MemoryStep]:
    """Return the bytes of a call's fullest operation, without those kept around the call, and the operation."""
    held = [0] * (len(memory.steps) + 1)
    for gone, nbytes in released:
        held[min(gone, len(memory.steps)) - 1] += nbytes
    donated = list(accumulate(reversed(held[:-1])))[::-1]
    found = [step.nbytes + nbytes for step, nbytes in zip(memory.steps, donated, strict=True)]
    most = max(found)
    return most, memory.steps[found.index(most)]


def positions(
    program: PhaseProgram,
    memories: Mapping[str, SegmentMemory],
    *,
    group_of: Mapping[str, int],
    external_nbytes: int = 0,
) -> tuple[Position, ...]:
    """Make one `Position` per call, with the bytes of its fullest operation plus `external_nbytes`."""
    found = []
    fullest: dict[tuple[str, Released], tuple[int, MemoryStep]] = {}  # alike in like calls
    for life in _lives(program, memories):
        call = life.call
        key = call.segment, tuple(sorted((gone, program.storages[s]) for s, gone in life.released.items()))
        if key not in fullest:
            fullest[key] = _fullest(life.memory, key[1])
        inside_nbytes, step = fullest[key]
        found.append(
            Position(
                name=call.name,
                phase=program.phase,
                non_model_nbytes=max(life.kept_nbytes + inside_nbytes, life.storing_nbytes) + external_nbytes,
                op=step.op,
                module=call.origin(step).module or call.module,
                reads=frozenset(program.chunk(p, group_of[p]) for _, p in call.parameters if p in group_of),
                writes=frozenset(Chunk(GRAD, group_of[p]) for _, p in call.gradients if p in group_of),
                cost_s=call.cost_s,
                sunk=tuple((name, value in program.handed_over) for value, name in call.gradients),
                left_nbytes=life.left_nbytes,
            )
        )
    return tuple(found)
