"""Describe a compiled graph before any plan: its programs, segments, and bytes at each call."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Generic, TypeVar

import torch
from torch import fx, nn

from chunkc.ir.estimates import EstimatedOperator, unknown_operators
from chunkc.ir.items import KEEP_ALL, ActivationPlan
from chunkc.ir.layout import ChunkGroup, ChunkLayout
from chunkc.ir.plan import Position
from chunkc.ir.program import PhaseProgram, SegmentMemory
from chunkc.passes.codegen import CompiledSegment
from chunkc.passes.memory.profile import positions
from chunkc.passes.planning.offload import Saved, candidates, with_offloaded
from chunkc.passes.planning.recompute import Recomputable, may_recompute, with_recompute
from chunkc.passes.planning.recompute_search import RecomputeRegions
from chunkc.passes.planning.step_profile import CallNeeds, StepProfile, at_least
from chunkc.passes.planning.updates import smallest_update
from chunkc.passes.planning.updates_in_backward import with_waiting
from chunkc.utils.recent import Recent

K = TypeVar("K")
V = TypeVar("V")

ROOM_FOR_LOSS = 3
"""User code between the phases may need this many times the outputs' bytes, for a loss."""

MAX_FORMS = 32
"""Forms of a graph that are remembered: with offloaded values, returned gradients, held tangents."""

MAX_LAYOUTS = 4
"""Layouts for which a graph remembers its profile, and its recompute regions."""

LARGEST_NUMBER_NBYTES = 512
"""The most bytes that an allocator takes for a single number."""


@dataclass(frozen=True)
class OwnMemory:
    """Positions of a forward's inputs and outputs that have a storage of their own, without parameters.

    `saved`: outputs that only the backward gets, largest first.
    """

    inputs: tuple[int, ...]
    user_outputs: tuple[int, ...]
    saved: tuple[int, ...]

    @staticmethod
    def of(program: PhaseProgram) -> OwnMemory:
        storage_of = program.value_storages
        counted = set(program.inputs.values())
        user_outputs: list[int] = []
        saved: dict[int, int] = {}  # position -> bytes
        for position, name in enumerate(program.outputs):
            if position < program.num_new_buffers or name is None or storage_of[name] in counted:
                continue
            counted.add(storage_of[name])
            if position < program.num_user_outputs:
                user_outputs.append(position)
            else:
                saved[position] = program.storages[storage_of[name]]
        inputs = tuple(i for i, name in enumerate(program.inputs) if name not in program.parameters)
        return OwnMemory(inputs, tuple(user_outputs), tuple(sorted(saved, key=saved.__getitem__, reverse=True)))


@dataclass(frozen=True)
class EarlierSearch:
    """The quickest activation plan that a search has found for a graph.

    Attributes:
        question: everything else that the answer depends on.
        allowed: groups that were allowed to be resident.
        room_nbytes: of the budget, without external bytes.
    """

    question: tuple[object, ...]
    allowed: frozenset[int]
    room_nbytes: int
    activation_plan: ActivationPlan
    seconds: float


class Latest(Generic[K, V]):
    """Results for the latest few keys, found by equality: a layout takes longer to hash than to compare."""

    def __init__(self) -> None:
        self._entries: list[tuple[K, V]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: K, make: Callable[[], V]) -> V:
        """Return the result for a key, from the cache or made."""
        for at, (known, value) in enumerate(self._entries):
            if known == key:
                self._entries.append(self._entries.pop(at))
                return value
        value = make()
        self._entries = [*self._entries[1 - MAX_LAYOUTS :], (key, value)]
        return value


@dataclass
class _Cache:
    """Results computed once per captured graph, of which they are a pure function.

    Attributes:
        forms: the graph's forms by how they were made.
        profiles: by a layout's groups, and the transient ones.
        regions: of the forward (see `activation_search`), by layout.
        earlier_search: the latest one.
    """

    forms: Recent[tuple[str, Hashable], Captured] = field(default_factory=lambda: Recent(MAX_FORMS))
    profiles: Latest[tuple[tuple[ChunkGroup, ...], frozenset[int]], StepProfile] = field(default_factory=Latest)
    regions: Latest[ChunkLayout, RecomputeRegions | None] = field(default_factory=Latest)
    earlier_search: EarlierSearch | None = None


@dataclass(frozen=True)
class Captured:
    """A compiled graph before any plan.

    Attributes:
        whole: compiled as one segment.
        offloaded: storages that are at home between forward and backward.
        activation_plan: values that are offloaded or recomputed.
        at_least: lower bounds that plans use in place of the graph's own smaller needs.
        graph_fraction: the graph's fraction of the model (see `policy.graph_fraction`).
        nothing_offloaded: the form that this one was made of by offloading values; None: this one offloads none, or
            its backward has changed since.
        cache: no part of the value: `dataclasses.replace` begins an empty one.
    """

    forward: PhaseProgram
    backward: PhaseProgram | None
    segments: Mapping[str, CompiledSegment]
    modules: Mapping[str, nn.Module]
    whole: bool
    offloaded: tuple[Saved, ...] = ()
    activation_plan: ActivationPlan = KEEP_ALL
    at_least: CallNeeds | None = None
    graph_fraction: float = 1.0
    nothing_offloaded: Captured | None = field(default=None, compare=False, repr=False)
    cache: _Cache = field(default_factory=_Cache, init=False, compare=False, repr=False)

    @property
    def unknown_operators(self) -> tuple[EstimatedOperator, ...]:
        """Calls of operators with a guess for their inner memory."""
        return unknown_operators(self.programs.values(), self.memories)

    @cached_property
    def makers(self) -> Mapping[str, str]:
        """Storage -> the module that made it."""
        makers: dict[str, str] = {}
        for program in self.programs.values():
            for call in program.calls:
                for storage in call.output_storages:
                    makers.setdefault(storage, call.module or "the model")
        return makers

    def returning(self, parameters: frozenset[str]) -> Captured:
        """Return the form that returns these parameters' gradients to autograd instead of sinking them."""
        return self._with_backward(PhaseProgram.returning, parameters)

    def leaving_out(self, parameters: frozenset[str]) -> Captured:
        """Return the form that drops these parameters' gradients as soon as they are made."""
        return self._with_backward(PhaseProgram.leaving_out, parameters)

    def with_sizes(self, nbytes: Callable[[int], int], cost_s: Callable[[float], float]) -> Captured:
        """Return the graph with `nbytes` applied to every number of bytes and `cost_s` to every call's seconds."""
        segments = {
            name: CompiledSegment(segment.run, segment.memory.with_sizes(nbytes))
            for name, segment in self.segments.items()
        }
        backward = None if self.backward is None else self.backward.with_sizes(nbytes, cost_s)
        forward = self.forward.with_sizes(nbytes, cost_s)
        return Captured(forward, backward, segments, self.modules, self.whole, graph_fraction=self.graph_fraction)

    @cached_property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """Tensors inside the compiled code, alive as long as the code is."""
        constants: dict[int, torch.Tensor] = {}
        for module in self.modules.values():
            for node in module.graph.find_nodes(op="get_attr") if isinstance(module, fx.GraphModule) else ():
                value = attrgetter(str(node.target))(module)
                if isinstance(value, torch.Tensor):
                    constants[value.untyped_storage().data_ptr()] = value
        return tuple(constants.values())

    def holding(self, tangents: frozenset[str]) -> Captured:
        """Return the form in which the caller keeps these of the backward's tangents alive."""
        return self._with_backward(PhaseProgram.holding, tangents)

    def _with_backward(
        self, changed: Callable[[PhaseProgram, frozenset[str]], PhaseProgram], names: frozenset[str]
    ) -> Captured:
        """Return the form with a backward that is changed for these names, or the graph itself if there are none."""
        backward = self.backward
        if not names or backward is None:
            return self

        def form() -> Captured:
            return replace(self, backward=changed(backward, names), nothing_offloaded=None)

        return self._remembered((changed.__name__, names), form)

    def _remembered(self, form: tuple[str, Hashable], make: Callable[[], Captured]) -> Captured:
        """Return a form of the graph from the cache, or make it."""
        forms = self.cache.forms
        return forms.find(form) or forms.keep(form, make())

    @cached_property
    def offloadable(self) -> tuple[Saved, ...]:
        """Storages that may be at home between forward and backward.

        A whole graph has none: its backward reads them at its very first operation.
        """
        return () if self.whole else candidates(self.forward, self.backward)

    @cached_property
    def repeatable(self) -> Recomputable | None:
        """Values that the backward can recompute by calling segments once more; None: none."""
        if self.whole or self.backward is None:
            return None
        return Recomputable(self.forward, self.backward, self.unrepeatable)

    @cached_property
    def unrepeatable(self) -> frozenset[str]:
        """Segments that may not be called twice: they draw random numbers, or have other effects."""
        graphs = {name: module.graph for name, module in self.modules.items() if isinstance(module, fx.GraphModule)}
        return frozenset(name for name in self.modules if name not in graphs or not may_recompute(graphs[name]))

    def following(self, activation_plan: ActivationPlan) -> Captured:
        """Return the form that offloads and recomputes the values of an activation plan."""
        if not activation_plan:
            return self
        return self._remembered(("following", activation_plan), lambda: self._following(activation_plan))

    def _following(self, activation_plan: ActivationPlan) -> Captured:
        lean = self._recomputing(activation_plan.recomputed)
        return lean._offloading(activation_plan.offloaded & {saved.storage for saved in lean.offloadable})

    def _recomputing(self, storages: frozenset[str]) -> Captured:
        if not storages:
            return self
        assert self.repeatable is not None
        assert not self.offloaded, "regions are chosen before values are offloaded"
        forward, backward = with_recompute(self.repeatable, storages)
        plan = ActivationPlan(recomputed=storages)
        return replace(self, forward=forward, backward=backward, activation_plan=plan)

    def _offloading(self, storages: frozenset[str]) -> Captured:
        if not storages:
            return self
        assert self.backward is not None
        forward, backward = with_offloaded(self.forward, storages), with_offloaded(self.backward, storages)
        return replace(
            self,
            forward=forward,
            backward=backward,
            offloaded=tuple(saved for saved in self.offloadable if saved.storage in storages),
            activation_plan=replace(self.activation_plan, offloaded=storages),
            nothing_offloaded=self,
        )

    @cached_property
    def offloadable_inputs(self) -> tuple[int, ...]:
        """Positions of the backward's inputs that may be stand-ins for offloaded or recomputed values."""
        storages = {saved.storage for saved in self.offloadable}
        inputs = self.backward.inputs.values() if self.backward is not None else ()
        return tuple(position for position, storage in enumerate(inputs) if storage in storages)

    @property
    def extra(self) -> tuple[str, ...]:
        """Values that the forward returns after its own outputs, for calls that the backward repeats."""
        outputs = self.forward.outputs
        return tuple(value for value in outputs[len(outputs) - self.forward.num_extra :] if value is not None)

    @property
    def tangents(self) -> tuple[str, ...]:
        """The backward's inputs that are gradients of the forward's outputs; all others were saved."""
        if self.backward is None:
            return ()
        num_saved = len(self.forward.outputs) - self.forward.num_user_outputs - self.forward.num_extra
        inputs = tuple(self.backward.inputs)
        return inputs[num_saved : len(inputs) - self.backward.num_extra]

    @property
    def tangent_nbytes(self) -> int:
        """Bytes of the gradients that the backward gets as arguments."""
        if self.backward is None:
            return 0
        return sum(self.backward.storages[self.backward.inputs[name]] for name in self.tangents)

    @cached_property
    def memories(self) -> Mapping[str, SegmentMemory]:
        """Segment -> its memory."""
        return {name: segment.memory for name, segment in self.segments.items()}

    @property
    def programs(self) -> Mapping[str, PhaseProgram]:
        """The graph's phases, by name."""
        return {p.phase: p for p in (self.forward, self.backward) if p is not None}

    @cached_property
    def own_memory(self) -> OwnMemory:
        return OwnMemory.of(self.forward)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Parameters that get a gradient in the backward."""
        return frozenset(name for _, _, name in self.backward.gradient_outputs) if self.backward else frozenset()

    @cached_property
    def _output_sizes(self) -> tuple[int, ...]:
        storage_of = self.forward.value_storages
        storages = {storage_of[value] for value in self.forward.results} - self.forward.held
        return tuple(self.forward.storages[storage] for storage in storages)

    @property
    def output_nbytes(self) -> int:
        """Bytes of the forward's outputs, without returned inputs."""
        return sum(self._output_sizes)

    @property
    def loss_nbytes(self) -> int:
        """Bytes of outputs that are single numbers: a loss is alive while its backward runs."""
        return sum(nbytes for nbytes in self._output_sizes if nbytes <= LARGEST_NUMBER_NBYTES)

    @property
    def caller_nbytes(self) -> int:
        """Bytes of a forward's inputs and outputs, which its caller still holds when the optimizer steps."""
        return self.forward.external_nbytes + self.output_nbytes

    def external_in_forward(self, live_nbytes: int, given_nbytes: int) -> int:
        """Return the external bytes during a forward.

        Args:
            live_nbytes: values of earlier calls that are alive, without the storages of this call's inputs. Outputs of
                the previous call are counted with the forward already.
            given_nbytes: of the inputs' storages. An input may be a view of a larger tensor than the one it was traced
                with: the whole storage is held.
        """
        return max(0, live_nbytes - self.output_nbytes) + max(0, given_nbytes - self.forward.external_nbytes)

    @property
    def saved_nbytes(self) -> int:
        """Bytes that are saved for the backward alone."""
        return self.between_nbytes - self.caller_nbytes

    @property
    def kept_nbytes(self) -> int:
        """Bytes of these that are neither offloaded nor recomputed."""
        return self.saved_nbytes - sum(saved.nbytes for saved in self.offloaded)

    @property
    def other_graphs_nbytes(self) -> int:
        """Bytes that the model's other graphs hold meanwhile, if they save as much per parameter as this one."""
        return math.ceil(max(0, self.kept_nbytes) * (1 / self.graph_fraction - 1))

    @cached_property
    def between_nbytes(self) -> int:
        """Bytes alive between the phases: inputs, outputs and saved values."""
        storage_of = self.forward.value_storages
        kept = self.forward.outputs[self.forward.num_new_buffers :]
        storages = {storage_of[value] for value in kept if value is not None} | self.forward.held
        return sum(self.forward.storages[storage] for storage in storages)


def profile(captured: Captured, layout: ChunkLayout) -> StepProfile:
    """Return the positions of every phase. In the forward, the caller still has the previous call's outputs.

    The captured graph remembers the latest ones: decisions and plans ask for the same.
    """
    make = _with_transient if layout.transient else _profile
    return captured.cache.profiles.find((layout.groups, layout.transient), lambda: make(captured, layout))


def _with_transient(captured: Captured, layout: ChunkLayout) -> StepProfile:
    step = profile(captured, replace(layout, transient=frozenset()))
    return replace(step, backward=with_waiting(step.backward, layout))


def _profile(captured: Captured, layout: ChunkLayout) -> StepProfile:
    least = captured.at_least
    if captured.nothing_offloaded is not None and least is None:
        return profile(captured.nothing_offloaded, layout).with_offloaded(captured.offloaded)
    group_of = layout.group_of()
    memories = captured.memories
    forward = positions(captured.forward, memories, group_of=group_of, external_nbytes=captured.output_nbytes)
    boundary_nbytes = captured.between_nbytes + ROOM_FOR_LOSS * captured.output_nbytes
    caller_nbytes = captured.caller_nbytes
    if least is not None:
        forward = at_least(forward, least.calls[: len(forward)])
        boundary_nbytes, caller_nbytes = least.boundary_nbytes, least.caller_nbytes
    if captured.backward is None:
        return StepProfile(forward, (), (), 0, caller_nbytes)
    backward: tuple[Position, ...] = positions(captured.backward, memories, group_of=group_of)
    if least is not None:
        backward = at_least(backward, least.calls[len(forward) :])
    trained = sorted(layout.groups_of(p for c in captured.backward.calls for _, p in c.gradients))
    update = smallest_update(layout, trained, caller_nbytes)
    return StepProfile(forward, backward, update, boundary_nbytes, caller_nbytes)
