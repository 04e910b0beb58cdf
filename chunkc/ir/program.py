"""A captured step as data: segments, the calls of each phase, the values and storages that flow between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from chunkc.ir.layout import PARAM, Chunk

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


RECOMPUTE = "rerun"
"""What the name of a call that a backward repeats begins with, in place of `forward`."""


def is_repeated(call: str) -> bool:
    """Whether a call of this name is one of the forward's that a backward repeats."""
    return RECOMPUTE in call.split(".")


@dataclass(frozen=True)
class Origin:
    """Where in the user's program an operation comes from: the module, and `file.py:12, code`. Empty: not known."""

    module: str
    source: str


@dataclass(frozen=True)
class Estimate:
    """Bytes that are a guess. Of an operator ("aten::name") that no rule is known for, its scratch: from its operands
    and results. Of Inductor's code that cannot be read (`estimates.unread_wrapper`), all bytes: from its graph."""

    operator: str
    nbytes: int


@dataclass(frozen=True)
class MemoryStep:
    """One moment inside a segment: an operation and the bytes alive while it runs.

    `nbytes` counts what the segment itself allocated (scratch included), not its inputs. `position` counts the
    operation among the segment's (None: not known), so that every call of the segment can name its own origin for it
    (`SegmentCall.origins`). It is a label: bytes are equal without it. `module` is that of the segment's first call.
    `estimate`: the part of `nbytes` that is no more than a guess.
    """

    op: str
    module: str
    nbytes: int
    position: int | None = field(default=None, compare=False)
    estimate: Estimate | None = None

    def with_sizes(self, nbytes: Callable[[int], int]) -> MemoryStep:
        """The same moment with `nbytes` of every number of bytes."""
        estimate = None if self.estimate is None else replace(self.estimate, nbytes=nbytes(self.estimate.nbytes))
        return replace(self, nbytes=nbytes(self.nbytes), estimate=estimate)


@dataclass(frozen=True)
class SegmentMemory:
    """What a compiled segment allocates and frees, moment by moment. Nothing ran to find it out.

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
        """The same moments with `nbytes` of every number of bytes."""
        steps = tuple(step.with_sizes(nbytes) for step in self.steps)
        return replace(self, steps=steps, storage_nbytes=tuple(map(nbytes, self.storage_nbytes)))


@dataclass(frozen=True)
class SegmentCall:
    """One run of a segment.

    Attributes:
        inputs: value names, in the order of the segment's inputs.
        outputs: value names, in the order of the segment's outputs.
        output_storages: the storage of each output.
        parameters: (position among the inputs, parameter name) for inputs that may live in chunks.
        gradients: (output value, parameter name): complete gradients that this call produces.
        module: the user's module that most of the call belongs to; empty: the model itself.
        cost_s: estimated seconds of arithmetic.
        origins: of the segment's operations, in order, in this call; empty where they are not known.
        recompute_call: the call without what it makes for later ones of the forward, of a segment without the
            operations for
            it: a backward may repeat that; None: it is the same.
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
        """The same call with `cost_s` of its seconds."""
        recompute_call = None if self.recompute_call is None else self.recompute_call.with_cost(cost_s)
        return replace(self, cost_s=cost_s(self.cost_s), recompute_call=recompute_call)

    def origin(self, step: MemoryStep) -> Origin:
        """Where the operation of one of the segment's steps comes from in this call."""
        if step.position is not None and step.position < len(self.origins):
            return self.origins[step.position]
        return Origin("" if self.origins else step.module, "")


@dataclass(frozen=True)
class PhaseProgram:
    """The forward or the backward of a step.

    Attributes:
        inputs: input value -> storage, in the order of the graph's placeholders.
        storages: storage -> bytes, of every storage in the phase but parameters'.
        held: storages that outlive the phase whatever it does: the caller holds them.
        parameters: input value -> parameter name, for inputs that are parameters in the layout.
        calls: segment calls, in order.
        outputs: what the phase returns, in order (None where nothing is returned).
        num_user_outputs: how many of the outputs the caller gets (the rest is saved for the backward).
        gradient_outputs: (position among the outputs, value, parameter): gradients that are sunk, not returned.
        num_new_buffers: how many of the user's outputs, the first ones, are new values of buffers: AOTAutograd copies
            them into the buffers and drops them.
        fitting: gradients that are laid out as their parameters, with no unseen bytes behind them.
        plain: outputs that size, stride, offset and dtype describe fully, given their storage's bytes.
        copied: storage -> the values in it that are saved, for storages that are at home between forward and backward:
            a forward's outputs are None there.
        remade: likewise, of storages that are dropped and made again by calls that the backward repeats.
        stand_ins: position among a forward's outputs -> (storage, which of its saved values), where something stands
            for a value that is absent.
        changing: inputs that have other contents once the forward has returned: buffers that the model updates.
        saved_as: of a backward: input -> the forward's value that it is, for saved ones.
        read_as: parameter -> the kind of chunk that calls read it from, where that is not the parameter's own.
        num_extra: how many of a forward's last outputs, and of its backward's last inputs, do not go through autograd:
            what repeated calls read.
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

    def chunk(self, parameter: str, group: int) -> Chunk:
        """The chunk that calls read a parameter of that group from."""
        return Chunk(self.read_as.get(parameter, PARAM), group)

    @property
    def results(self) -> tuple[str, ...]:
        """What the caller gets and may keep."""
        values = self.outputs[self.num_new_buffers : self.num_user_outputs]
        return tuple(value for value in values if value is not None)

    @property
    def external_nbytes(self) -> int:
        return sum(self.storages[name] for name in self.held)

    def with_sizes(self, nbytes: Callable[[int], int], cost_s: Callable[[float], float]) -> PhaseProgram:
        """The same program with `nbytes` of every number of bytes and `cost_s` of every call's seconds."""
        storages = {name: nbytes(size) for name, size in self.storages.items()}
        calls = tuple(call.with_cost(cost_s) for call in self.calls)
        return replace(self, storages=storages, calls=calls)

    def value_storages(self) -> Mapping[str, str]:
        """The storage of every value of the phase."""
        return self._value_storages

    @cached_property
    def _value_storages(self) -> Mapping[str, str]:
        found = dict(self.inputs)
        for call in self.calls:
            found.update(zip(call.outputs, call.output_storages))
        return found

    @cached_property
    def handed_over(self) -> frozenset[str]:
        """Gradients that may become `.grad` as they are: laid out as their parameters, in storage that their call made
        for them alone: one value, one gradient, nothing returned."""
        storage_of = self.value_storages()
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

    def holding(self, values: frozenset[str]) -> PhaseProgram:
        """The program beside a caller that keeps these of its inputs, where it has them; of absent ones what stands for
        them."""
        if not values:
            return self
        absent = self.copied.keys() | self.remade.keys()
        return replace(
            self, held=self.held | ({self.inputs[value] for value in values if value in self.inputs} - absent)
        )

    def returning(self, parameters: frozenset[str]) -> PhaseProgram:
        """The program that returns these parameters' gradients to autograd, for hooks on them, and sinks the others."""
        if not parameters:
            return self
        outputs = list(self.outputs)
        for position, value, parameter in self.gradient_outputs:
            if parameter in parameters:
                outputs[position] = value
        return replace(self, outputs=tuple(outputs)).leaving_out(parameters)

    def leaving_out(self, parameters: frozenset[str]) -> PhaseProgram:
        """The program that sinks no gradients of these parameters."""
        if not parameters:
            return self
        calls = tuple(
            replace(call, gradients=tuple(pair for pair in call.gradients if pair[1] not in parameters))
            for call in self.calls
        )
        return replace(self, calls=calls)
