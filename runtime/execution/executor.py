"""The executor: a rewritten FX graph as a flat list of instructions over a register file.

A value's register is cleared before its last reader runs, so that the reader holds the only reference and may free
the value inside. Nothing here decides anything: order, slots and waits are the plan's. What an instruction computes,
values in registers included, is enqueued on the tier; all else is the host's.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import fx

from chunkc.ir import chunk_ops
from chunkc.ir.errors import ChunkcError
from chunkc.ir.layout import Chunk
from chunkc.ir.plan import Tile
from chunkc.runtime.execution.saved import SavedValues
from chunkc.runtime.execution.saved_instructions import SAVED_OPS, lower_saved
from chunkc.runtime.store.store import ChunkStore

Registers = list[Any]
Segment = Callable[[list[Any]], Sequence[Any]]


class Instruction(Protocol):
    def __call__(self, registers: Registers, run: Run) -> None: ...


@dataclass
class Measurement:
    """Measured bytes per moment, in order, and seconds of arithmetic, or of enqueuing it where the host runs ahead.

    `between_nbytes` is the largest reading between moments: while chunks come and go and gradients are sunk. `spans_s`:
    when each moment began and ended, by `time.perf_counter`. `with_home_nbytes`: the largest reading together with what
    was in use at home by then. `host_s` is the rest: what the host took for `num_instructions` beyond arithmetic,
    updates (`update_s`) and waits for copies. `unplanned_nbytes`: what was there as the run began and no plan counts:
    tensors of the program's own. All readings have it in them.
    """

    peaks: list[tuple[str, int | None]] = field(default_factory=list)
    between_nbytes: int = 0
    with_home_nbytes: int = 0
    compute_s: float = 0.0
    update_s: float = 0.0
    host_s: float = 0.0
    num_instructions: int = 0
    unplanned_nbytes: int = 0
    spans_s: list[tuple[float, float]] = field(default_factory=list)
    _began_s: float = 0.0

    @classmethod
    def beginning(cls, store: ChunkStore, planned_nbytes: int) -> Measurement:
        """Of a run that begins now; `planned_nbytes`: what its plan counts on the compute tier now, slots apart."""
        store.tier.lap_peak_nbytes()
        present_nbytes = store.tier.lap_peak_nbytes()  # the largest since a moment ago
        counted_nbytes = planned_nbytes + store.slot_nbytes
        return cls(unplanned_nbytes=0 if present_nbytes is None else max(0, present_nbytes - counted_nbytes))

    @property
    def peak_nbytes(self) -> int | None:
        """The largest of all readings; None where nothing meters the tier."""
        readings = [nbytes for _, nbytes in self.peaks if nbytes is not None]
        return max(self.between_nbytes, *readings) if readings else None

    def begin(self, store: ChunkStore) -> None:
        """A moment begins: what was read so far belongs to the time before it."""
        nbytes = self._read(store)
        if nbytes is not None and nbytes > self.between_nbytes:
            self.between_nbytes = nbytes
        self._began_s = time.perf_counter()

    def end(self, name: str, store: ChunkStore) -> None:
        """A moment has ended."""
        self.spans_s.append((self._began_s, time.perf_counter()))
        self.peaks.append((name, self._read(store)))

    def _read(self, store: ChunkStore) -> int | None:
        """The largest bytes of the compute tier since the last call of this."""
        nbytes = store.tier.lap_peak_nbytes()
        if nbytes is not None:
            self.with_home_nbytes = max(self.with_home_nbytes, nbytes + store.arena.used_nbytes)
        return nbytes


@dataclass
class Run:
    """What one execution needs besides its registers."""

    store: ChunkStore
    measurement: Measurement
    update: Callable[[Tile], None] | None = None
    """Of the optimizer: updates a tile in slots."""
    settled: Callable[[int], None] | None = None
    saved: SavedValues | None = None


@dataclass(frozen=True)
class _Event:
    do: Callable[[ChunkStore, Chunk, str], None]
    chunk: Chunk
    link: str = ""

    def __call__(self, registers: Registers, run: Run) -> None:
        self.do(run.store, self.chunk, self.link)


@dataclass(frozen=True)
class _Settle:
    group: int

    def __call__(self, registers: Registers, run: Run) -> None:
        assert run.settled is not None
        run.settled(self.group)


@dataclass(frozen=True)
class _Parameter:
    chunk: Chunk
    name: str
    target: int

    def __call__(self, registers: Registers, run: Run) -> None:
        registers[self.target] = run.store.parameter_view(self.chunk, self.name)


@dataclass(frozen=True)
class _Call:
    name: str
    segment: Segment
    arguments: tuple[int, ...]
    cleared: tuple[int, ...]
    targets: tuple[tuple[int, int], ...]  # (register, output)
    chunks: tuple[Chunk, ...]

    def __call__(self, registers: Registers, run: Run) -> None:
        store, measurement = run.store, run.measurement
        tier = store.tier
        for chunk in self.chunks:
            store.begin_compute(chunk)
        store.drop_spare_slots()
        measurement.begin(store)
        start_s = time.perf_counter()
        tier.enqueue(self._compute, registers)
        measurement.compute_s += time.perf_counter() - start_s
        for chunk in self.chunks:
            store.end_compute(chunk)
        measurement.end(self.name, store)

    def _compute(self, registers: Registers) -> None:
        arguments = [registers[index] for index in self.arguments]
        for index in self.cleared:
            registers[index] = None
        outputs = self.segment(arguments)
        for register, position in self.targets:
            registers[register] = outputs[position]


@dataclass(frozen=True)
class _Sink:
    name: str
    chunk: Chunk | None
    source: int
    owned: bool
    last: bool

    def __call__(self, registers: Registers, run: Run) -> None:
        run.store.sink(self.name, self.chunk, partial(self._take, registers), owned=self.owned)

    def _take(self, registers: Registers) -> torch.Tensor:
        gradient = registers[self.source]
        if self.last:
            registers[self.source] = None
        return gradient


@dataclass(frozen=True)
class _Update:
    tile: Tile

    def __call__(self, registers: Registers, run: Run) -> None:
        assert run.update is not None
        run.store.drop_spare_slots()
        run.measurement.begin(run.store)
        start_s = time.perf_counter()
        run.update(self.tile)
        run.measurement.update_s += time.perf_counter() - start_s
        run.measurement.end(f"update.{self.tile}", run.store)


def _prefetch(store: ChunkStore, chunk: Chunk, link: str) -> None:
    store.prefetch(chunk, link)


def _wait(store: ChunkStore, chunk: Chunk, link: str) -> None:
    store.wait(chunk)  # whose slot knows the copy


def _write_back(store: ChunkStore, chunk: Chunk, link: str) -> None:
    store.write_back(chunk, link)


def _evict(store: ChunkStore, chunk: Chunk, link: str) -> None:
    store.evict(chunk)


_EVENTS: Mapping[object, Callable[[ChunkStore, Chunk, str], None]] = {
    chunk_ops.prefetch: _prefetch,
    chunk_ops.wait: _wait,
    chunk_ops.write_back: _write_back,
    chunk_ops.evict: _evict,
}


@dataclass(frozen=True)
class Executable:
    """A phase, lowered."""

    instructions: tuple[Instruction, ...]
    num_registers: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    @cached_property
    def _calls(self) -> tuple[Callable[[Registers, Run], None], ...]:
        """The instructions, bound once: there are hundreds, and each takes microseconds."""
        return tuple(instruction.__call__ for instruction in self.instructions)

    def __call__(self, arguments: list[Any], run: Run) -> list[Any]:
        """Run with `arguments`, a list that is emptied. An error leaves the store without slots.

        Raises:
            StreamError, HomeError: a copy failed; parameters and gradients at home stay valid.
        """
        start_s, waited_s = time.perf_counter(), run.store.traffic.wait_s
        registers: Registers = [None] * self.num_registers
        for register, argument in zip(self.inputs, arguments, strict=True):
            if register is not None:
                registers[register] = argument
        arguments.clear()
        argument = None
        run.store.tier.join_stream()
        try:
            with torch.no_grad():
                for call in self._calls:
                    call(registers, run)
                run.store.tier.materialise()
            run.store.tier.mark()  # where the next phase begins, on whatever stream
        except BaseException as error:
            if run.saved is not None:
                run.saved.wait_out()  # copies read registers
            registers.clear()
            try:
                run.store.release_slots()
            except ChunkcError as second:
                error.add_note(f"while giving slots back after this: {second}")
            try:
                run.store.tier.mark()  # what was enqueued before the error runs on, and the next phase comes after it
            except RuntimeError as second:  # the error broke the device
                error.add_note(f"while marking the stream after this: {second}")
            raise
        run.store.drop_spare_slots()
        run.measurement.begin(run.store)
        waited_s = run.store.traffic.wait_s - waited_s
        self._account(run.measurement, time.perf_counter() - start_s - waited_s)
        return [None if register is None else registers[register] for register in self.outputs]

    def _account(self, measurement: Measurement, busy_s: float) -> None:
        measurement.host_s = busy_s - measurement.compute_s - measurement.update_s
        measurement.num_instructions = len(self.instructions)


def lower(graph: fx.Graph, segments: Mapping[str, Segment]) -> Executable:
    """Turn a rewritten graph into instructions.

    Args:
        graph: as `passes.insert` builds it.
        segments: compiled segments by name; each takes a list, which it empties, and returns a sequence.
    """
    register = {n: i for i, n in enumerate(n for n in graph.nodes if _has_value(n))}
    last_reader: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            last_reader[source] = node
    chunk_of = {n: n.args[0] for n in graph.nodes if n.target is chunk_ops.parameter}
    instructions: list[Instruction] = []
    for node in graph.nodes:
        args: Any = node.args
        if node.op == "call_module":
            instructions.append(
                _Call(
                    name=node.meta["call"],
                    segment=segments[str(node.target)],
                    arguments=tuple(register[a] for a in args),
                    cleared=tuple(register[a] for a in dict.fromkeys(args) if last_reader[a] is node),
                    targets=tuple((register[u], u.args[1]) for u in node.users if u in last_reader),
                    chunks=tuple(dict.fromkeys(chunk_of[a] for a in args if a in chunk_of)),
                )
            )
        elif node.op == "call_function" and node.target in _EVENTS:
            instructions.append(_Event(_EVENTS[node.target], *args))
        elif node.target is chunk_ops.parameter:
            chunk, name = args
            instructions.append(_Parameter(chunk, name, register[node]))
        elif node.target is chunk_ops.sink:
            name, chunk, source, owned = args
            last = last_reader[source] is node
            instructions.append(_Sink(name, chunk, register[source], bool(owned) and last, last))
        elif node.target in SAVED_OPS:
            instructions.append(lower_saved(node, register, last_reader))
        elif node.target is chunk_ops.settle:
            instructions.append(_Settle(*args))
        elif node.target is chunk_ops.update:
            instructions.append(_Update(Tile(*args)))
        else:
            assert node.op in ("placeholder", "output") or node.target is operator.getitem, node.format_node()
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    returned: Any = next(iter(reversed(graph.nodes))).args[0]
    return Executable(
        tuple(instructions),
        len(register),
        tuple(register[n] if n in last_reader else None for n in inputs),
        tuple(None if value is None else register[value] for value in returned),
    )


def _has_value(node: fx.Node) -> bool:
    return node.op == "placeholder" or node.target in (operator.getitem, chunk_ops.parameter, chunk_ops.reload)
