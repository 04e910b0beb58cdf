"""Execute a rewritten FX graph as a flat list of instructions over a register file.

A value's register is cleared before its last reader runs, so that the reader holds the only reference and may free
the value inside. Nothing here decides anything: order, slots and waits are the plan's. An instruction's computation,
including its reads and writes of registers, is enqueued on the tier; the rest runs on the host.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from chunkc.ir import chunk_ops
from chunkc.ir.errors import ChunkcError
from chunkc.ir.items import SavedStorage
from chunkc.ir.layout import Chunk
from chunkc.ir.plan import Tile
from chunkc.runtime.execution.run import Instruction, Measurement, Registers, Run
from chunkc.runtime.execution.saved_instructions import lower_saved

Segment = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class _Prefetch:
    """Take a slot for a chunk and start to fill it."""

    chunk: Chunk
    link: str

    def __call__(self, registers: Registers, run: Run) -> None:
        run.store.prefetch(self.chunk, self.link)


@dataclass(frozen=True)
class _Wait:
    """Let computation wait for the copy of a chunk that is under way, in or out.

    Attributes:
        link: of the copy. The slot has its mark, so the run does not need it.
    """

    chunk: Chunk
    link: str

    def __call__(self, registers: Registers, run: Run) -> None:
        run.store.slots.wait(self.chunk)


@dataclass(frozen=True)
class _WriteBack:
    """Start to copy a chunk's slot home."""

    chunk: Chunk
    link: str

    def __call__(self, registers: Registers, run: Run) -> None:
        run.store.write_back(self.chunk, self.link)


@dataclass(frozen=True)
class _Evict:
    """Free a chunk's slot."""

    chunk: Chunk

    def __call__(self, registers: Registers, run: Run) -> None:
        run.store.slots.evict(self.chunk)


@dataclass(frozen=True)
class _GradientsComplete:
    """Report that a group's gradients are complete."""

    group: int

    def __call__(self, registers: Registers, run: Run) -> None:
        assert run.gradients_complete is not None
        run.gradients_complete(self.group)


@dataclass(frozen=True)
class _Parameter:
    """Put a parameter's view of its slot into a register."""

    chunk: Chunk
    name: str
    target: int

    def __call__(self, registers: Registers, run: Run) -> None:
        registers[self.target] = run.store.views.slot_view(self.chunk, self.name)


@dataclass(frozen=True)
class _Call:
    """Call a compiled segment, as one moment."""

    name: str
    segment: Segment
    arguments: tuple[int, ...]
    cleared: tuple[int, ...]
    targets: tuple[tuple[int, int], ...]  # (register, output)
    chunks: tuple[Chunk, ...]

    def __call__(self, registers: Registers, run: Run) -> None:
        store, slots, measurement = run.store, run.store.slots, run.measurement
        for chunk in self.chunks:
            slots.begin_compute(chunk)
        slots.drop_spare()
        measurement.begin(store)
        start_s = time.perf_counter()
        store.tier.enqueue(self._compute, registers)
        measurement.compute_s += time.perf_counter() - start_s
        for chunk in self.chunks:
            slots.end_compute(chunk)
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
    """Take a complete gradient out of a register, into its slot or into `.grad`."""

    name: str
    chunk: Chunk | None
    source: int
    owned: bool
    last: bool

    def __call__(self, registers: Registers, run: Run) -> None:
        run.store.gradients.sink(self.name, self.chunk, partial(self._take, registers), owned=self.owned)

    def _take(self, registers: Registers) -> torch.Tensor:
        gradient = registers[self.source]
        if self.last:
            registers[self.source] = None
        return gradient


@dataclass(frozen=True)
class _Update:
    """Update a tile in slots, as one moment."""

    tile: Tile

    def __call__(self, registers: Registers, run: Run) -> None:
        assert run.update is not None
        run.store.slots.drop_spare()
        run.measurement.begin(run.store)
        start_s = time.perf_counter()
        run.update(self.tile)
        run.measurement.update_s += time.perf_counter() - start_s
        run.measurement.end(f"update.{self.tile}", run.store)


_EVENTS: Mapping[object, Callable[..., Instruction]] = {
    chunk_ops.prefetch: _Prefetch,
    chunk_ops.wait: _Wait,
    chunk_ops.write_back: _WriteBack,
    chunk_ops.evict: _Evict,
}
"""Instruction of each event of the plan on a chunk."""


@dataclass(frozen=True)
class Executable:
    """Lowered phase: instructions, and the registers of inputs and outputs."""

    instructions: tuple[Instruction, ...]
    num_registers: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    _calls: tuple[Callable[[Registers, Run], None], ...] = field(init=False, repr=False, compare=False)
    """Bound methods of the instructions: there are hundreds, and binding each takes microseconds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_calls", tuple(instruction.__call__ for instruction in self.instructions))

    def __call__(self, arguments: list[Any], run: Run) -> list[Any]:
        """Run the phase with `arguments`, a list that is emptied. An error leaves the store without slots.

        Raises:
            StreamError, HomeError: a copy failed; parameters and gradients at home stay valid.
        """
        start_s, waited_s = time.perf_counter(), run.store.slots.traffic.wait_s
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
            run.store.tier.mark()  # the next phase starts after this mark, on whatever stream it is
        except BaseException as error:
            if run.saved is not None:
                run.saved.wait_out()  # copies read registers
            registers.clear()
            try:
                run.store.release_slots()
            except ChunkcError as second:
                error.add_note(f"while giving slots back after this: {second}")
            try:
                run.store.tier.mark()  # work enqueued before the error still runs: the next phase starts after it
            except RuntimeError as second:  # the error broke the device
                error.add_note(f"while marking the stream after this: {second}")
            raise
        run.store.slots.drop_spare()
        run.measurement.begin(run.store)
        waited_s = run.store.slots.traffic.wait_s - waited_s
        self._account(run.measurement, time.perf_counter() - start_s - waited_s)
        return [None if register is None else registers[register] for register in self.outputs]

    def _account(self, measurement: Measurement, busy_s: float) -> None:
        measurement.host_s = busy_s - measurement.compute_s - measurement.update_s
        measurement.num_instructions = len(self.instructions)


def lower(graph: fx.Graph, segments: Mapping[str, Segment]) -> Executable:
    """Lower a rewritten graph to instructions.

    Args:
        graph: as `passes.rewrite.insert` builds it.
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
        elif _is_of_saved(node):
            instructions.append(lower_saved(node, register, last_reader))
        elif node.op == "call_function" and node.target in _EVENTS:
            instructions.append(_EVENTS[node.target](*args))
        elif node.target is chunk_ops.parameter:
            chunk, name = args
            instructions.append(_Parameter(chunk, name, register[node]))
        elif node.target is chunk_ops.sink:
            name, chunk, source, owned = args
            last = last_reader[source] is node
            instructions.append(_Sink(name, chunk, register[source], bool(owned) and last, last))
        elif node.target is chunk_ops.settle:
            instructions.append(_GradientsComplete(*args))
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
    return (
        node.op == "placeholder"
        or node.target in (operator.getitem, chunk_ops.parameter)
        or (node.target is chunk_ops.prefetch and _is_of_saved(node))
    )


def _is_of_saved(node: fx.Node) -> bool:
    """Whether it is a chunk node on a storage that a forward saves."""
    return bool(node.args) and isinstance(node.args[0], SavedStorage)
