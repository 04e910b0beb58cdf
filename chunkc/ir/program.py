"""Represent a captured step: segments, the calls of each phase, the values and storages that flow between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from chunkc.ir.layout import PARAM, Chunk

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


RECOMPUTE = "rerun"
"""Prefix of the name of a call that a backward repeats, in place of `forward`."""


def is_repeated(call: str) -> bool:
    """Whether a call of this name is a forward call that a backward repeats."""
    return RECOMPUTE in call.split(".")


@dataclass(frozen=True)
class Origin:
    """Origin of an operation in the user's program: the module, and `file.py:12, code`. Empty: not known."""

    module: str
    source: str


@dataclass(frozen=True)
class Estimate:
    """Estimated bytes, where no exact ones are known.

    Of an operator ("aten::name") without a rule, they are its scratch, estimated from its operands and results. Of
    Inductor's code that cannot be read (`estimates.unread_wrapper`), they are all bytes, estimated from its graph.
    """

    operator: str
    nbytes: int


@dataclass(frozen=True)
class MemoryStep:
    """A moment inside a segment: an operation and the bytes alive while it runs.

    `nbytes` counts the bytes that the segment itself allocated (scratch included), not its inputs. `position` counts
    the operation among the segment's (None: not known), so that every call of the segment can name its own origin for
    it (`SegmentCall.origins`). It is a label: bytes are equal without it. `module` is that of the segment's first call.
    `estimate`: the part of `nbytes` that is estimated.
    """

    op: str
    module: str
    nbytes: int
    position: int | None = field(default=None, compare=False)
    estimate: Estimate | None = None

    def with_sizes(self, nbytes: Callable[[int], int]) -> MemoryStep:
        """Apply `nbytes` to every number of bytes."""
        estimate = None if self.estimate is None else replace(self.estimate, nbytes=nbytes(self.estimate.nbytes))
        return replace(self, nbytes=nbytes(self.nbytes), estimate=estimate)


@dataclass(frozen=True)
class SegmentMemory:
    """Allocations of a compiled segment, moment by moment. Nothing is run to learn them.

    Attributes:
        steps: the moments, in order; never empty.
        input_released: per input, the first step at which the segment no longer holds it.
        outputs: per output, the storage it lives in: `>= 0` for one the segment allocated (an index into
            `storage_nbytes`), `-1 - k` for input k's own storage.
        storage_nbytes: bytes of each storage that leaves the segment.
    """

    steps: tuple[MemoryStep, ...]
    input_released: tuple[int, ...]
    outputs: tuple[int, ...]
    storage_nbytes: tuple[int, ...]

    def with_sizes(self, nbytes: Callable[[int], int]) -> SegmentMemory:
        """Apply `nbytes` to every number of bytes."""
        steps = tuple(step.with_sizes(nbytes) for step in self.steps)
        return replace(self, steps=steps, storage_nbytes=tuple(map(nbytes, self.storage_nbytes)))


@dataclass(frozen=True)
class SegmentCall:
    """A run of a segment.

    Attributes:
        inputs: value names, in the order of the segment's inputs.
        outputs: value names, in the order of the segment's outputs.
        output_storages: the storage of each output.
        parameters: (position among the inputs, parameter name) for inputs that may live in chunks.
        gradients: (output value, parameter name): complete gradients that this call produces.
        module: the user's module that most of the call belongs to; empty: the model itself.
        cost_s: estimated seconds of arithmetic.
        origins: of the segment's operations, in order, in this call; empty if they are not known.
        recompute_call: the call that a backward may repeat instead, of a smaller segment that computes no results for
            later forward calls; None: it repeats this one.
    """

    name: str
    segment: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_storages: tuple[str, ...]
    parameters: tuple[tuple[int, str], ...]
    gradients: tuple[tuple[str, str], ...]
    module: str
    cost_s: float
    origins: tuple[Origin, ...] = ()
    recompute_call: SegmentCall | None = None

    def with_cost(self, cost_s: Callable[[float], float]) -> SegmentCall:
        """Apply `cost_s` to its seconds."""
        recompute_call = None if self.recompute_call is None else self.recompute_call.with_cost(cost_s)
        return replace(self, cost_s=cost_s(self.cost_s), recompute_call=recompute_call)

    def origin(self, step: MemoryStep) -> Origin:
        """Return the origin of a segment step's operation in this call."""
        if step.position is not None and step.position < len(self.origins):
            return self.origins[step.position]
        return Origin("" if self.origins else step.module, "")


@dataclass(frozen=True)
class PhaseProgram:
    """The forward or the backward of a step.

    Attributes:
        inputs: input value -> storage, in the order of the graph's placeholders.
        storages: storage -> bytes, of every storage in the phase except parameters'.
        held: storages that outlive the phase in any case: the caller holds them.
        parameters: input value -> parameter name, for inputs that are parameters in the layout.
        calls: segment calls, in order.
        outputs: values that the phase returns, in order (None for an empty output).
        num_user_outputs: number of outputs for the caller (the rest is saved for the backward).
        gradient_outputs: (position among the outputs, value, parameter): gradients that are sunk, not returned.
        num_new_buffers: number of the user's outputs, the first ones, that are new values of buffers: AOTAutograd
            copies them into the buffers and drops them.
        fitting: gradients that are laid out as their parameters, with no unseen bytes behind them.
        plain: outputs that size, stride, offset and dtype describe fully, given their storage's bytes.
        copied: offloaded storage -> its saved values: None among a forward's outputs.
        remade: recomputed storage -> its saved values, likewise None among a forward's outputs.
        stand_ins: position among a forward's outputs -> (storage, index of the saved value in it), for placeholders of
            offloaded and recomputed values.
        changing: inputs that the forward leaves with other contents: buffers that the model updates.
        saved_as: of a backward: input -> the forward's value that it is, for saved ones.
        read_as: parameter -> the kind of chunk that calls read it from, if it is not the parameter's own.
        num_extra: number of a forward's last outputs, and of its backward's last inputs, that bypass autograd: values
            that repeated calls read.
        copy_blocks: gradient -> bytes of the block through which it is copied to its place, where there is one.
    """

    phase: str
    inputs: Mapping[str, str]
    storages: Mapping[str, int]
    held: frozenset[str]
    parameters: Mapping[str, str]
    calls: tuple[SegmentCall, ...]
    outputs: tuple[str | None, ...]
    num_user_outputs: int
    gradient_outputs: tuple[tuple[int, str, str], ...] = ()
    fitting: frozenset[str] = frozenset()
    num_new_buffers: int = 0
    plain: frozenset[str] = frozenset()
    copied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    remade: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stand_ins: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    changing: frozenset[str] = frozenset()
    saved_as: Mapping[str, str] = field(default_factory=dict)
    read_as: Mapping[str, str] = field(default_factory=dict)
    num_extra: int = 0
    copy_blocks: Mapping[str, int] = field(default_factory=dict)

    def chunk(self, parameter: str, group: int) -> Chunk:
        """Return the chunk that calls read a parameter of that group from."""
        return Chunk(self.read_as.get(parameter, PARAM), group)

    @property
    def results(self) -> tuple[str, ...]:
        """Values that the caller gets and may keep."""
        values = self.outputs[self.num_new_buffers : self.num_user_outputs]
        return tuple(value for value in values if value is not None)

    @property
    def external_nbytes(self) -> int:
        return sum(self.storages[name] for name in self.held)

    def with_sizes(self, nbytes: Callable[[int], int], cost_s: Callable[[float], float]) -> PhaseProgram:
        """Apply `nbytes` to every number of bytes and `cost_s` to every call's seconds."""
        storages = {name: nbytes(size) for name, size in self.storages.items()}
        calls = tuple(call.with_cost(cost_s) for call in self.calls)
        copy_blocks = {name: nbytes(size) for name, size in self.copy_blocks.items()}
        return replace(self, storages=storages, calls=calls, copy_blocks=copy_blocks)

    @cached_property
    def value_storages(self) -> Mapping[str, str]:
        """Storage of every value of the phase."""
        storages = dict(self.inputs)
        for call in self.calls:
            storages.update(zip(call.outputs, call.output_storages))
        return storages

    @cached_property
    def handed_over(self) -> frozenset[str]:
        """Gradients that may become `.grad` as they are.

        They are laid out as their parameters, in storage that their call allocated for them alone: one value, one
        gradient, not returned.
        """
        storage_of = self.value_storages
        wanted = Counter(storage_of[value] for call in self.calls for value, _ in call.gradients)
        if not wanted:
            return frozenset()
        sharing = wanted + Counter(storage_of[value] for value in self.outputs if value is not None)
        for call in self.calls:
            for storage in call.output_storages:
                if storage in wanted:
                    sharing[storage] += 1
        return frozenset(
            value
            for call in self.calls
            for value, _ in call.gradients
            if value in self.fitting
            and storage_of[value].startswith(f"{call.name}:")
            and sharing[storage_of[value]] == 2
        )

    def with_stand_ins(self, storages: Collection[str]) -> tuple[PhaseProgram, dict[str, tuple[str, ...]]]:
        """Return the forward that returns placeholders for saved values in these storages, and the values of each."""
        storage_of, outputs, stand_ins = self.value_storages, list(self.outputs), dict(self.stand_ins)
        replaced: dict[str, tuple[str, ...]] = {}
        for position, value in enumerate(self.outputs):
            if position >= self.num_user_outputs and value is not None and (storage := storage_of[value]) in storages:
                values = replaced.get(storage, ())
                stand_ins[position], replaced[storage] = (storage, len(values)), (*values, value)
                outputs[position] = None
        return replace(self, outputs=tuple(outputs), stand_ins=stand_ins), replaced

    def holding(self, values: frozenset[str]) -> PhaseProgram:
        """Return the program of a caller that keeps these of its inputs.

        Of offloaded and recomputed inputs the caller keeps only placeholders, which hold no bytes.
        """
        if not values:
            return self
        planned = self.copied.keys() | self.remade.keys()  # a caller's placeholder holds none of their bytes
        return replace(
            self, held=self.held | ({self.inputs[value] for value in values if value in self.inputs} - planned)
        )

    def returning(self, parameters: frozenset[str]) -> PhaseProgram:
        """Return the program that returns these parameters' gradients to autograd, for hooks on them.

        The other gradients are sunk as before.
        """
        if not parameters:
            return self
        outputs = list(self.outputs)
        for position, value, parameter in self.gradient_outputs:
            if parameter in parameters:
                outputs[position] = value
        return replace(self, outputs=tuple(outputs)).leaving_out(parameters)

    def leaving_out(self, parameters: frozenset[str]) -> PhaseProgram:
        """Return the program that sinks no gradients of these parameters."""
        if not parameters:
            return self
        calls = tuple(
            replace(call, gradients=tuple(pair for pair in call.gradients if pair[1] not in parameters))
            for call in self.calls
        )
        return replace(self, calls=calls)
