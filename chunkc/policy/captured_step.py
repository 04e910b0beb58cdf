"""What compilation made of a graph, before any plan, and what it needs at each of its operations."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

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
from chunkc.passes.planning.residency import StepProfile
from chunkc.passes.planning.updates import smallest_tiles, update_positions
from chunkc.passes.planning.updates_in_backward import with_waiting

ROOM_FOR_LOSS = 3
"""While user code runs between the phases, it may need this many times the outputs' bytes, for a loss."""

MAX_KNOWN = 32
"""Ways in which a graph is kept: values that are absent, gradients that are returned, tangents that are held."""

LARGEST_NUMBER_NBYTES = 512
"""Of one number: no allocator gives more for it."""


@dataclass(frozen=True)
class OwnMemory:
    """Which of a forward's inputs and outputs take memory of their own, by their positions; parameters left out.

    `saved` are those that only the backward gets, the largest first.
    """

    inputs: tuple[int, ...]
    user_outputs: tuple[int, ...]
    saved: tuple[int, ...]

    @staticmethod
    def of(program: PhaseProgram) -> OwnMemory:
        storage_of = program.value_storages()
        seen = set(program.inputs.values())
        user_outputs: list[int] = []
        saved: dict[int, int] = {}  # with its bytes
        for position, name in enumerate(program.outputs):
            if position < program.num_new_buffers or name is None or storage_of[name] in seen:
                continue
            seen.add(storage_of[name])
            if position < program.num_user_outputs:
                user_outputs.append(position)
            else:
                saved[position] = program.storages[storage_of[name]]
        inputs = tuple(i for i, name in enumerate(program.inputs) if name not in program.parameters)
        return OwnMemory(inputs, tuple(user_outputs), tuple(sorted(saved, key=saved.__getitem__, reverse=True)))


@dataclass(frozen=True)
class CallNeeds:
    """What a step needs at each of its calls, as far as plans depend on it.

    Attributes:
        calls: of both phases: bytes at the call's peak, bytes once it is over, seconds, and the operation at the peak.
        boundary_nbytes: between the phases (see `StepProfile`).
        caller_nbytes: that the forward's caller holds when the optimizer steps.
    """

    calls: tuple[tuple[int, int, float, str], ...]
    boundary_nbytes: int
    caller_nbytes: int

    @staticmethod
    def of(captured: Captured, layout: ChunkLayout) -> CallNeeds:
        """What a graph needs; the latest is kept with it."""
        step = profile(captured, layout)
        known: tuple[StepProfile, CallNeeds] | None = captured.__dict__.get("_needed")
        if known is None or known[0] is not step:
            calls = tuple((p.non_model_nbytes, p.left_nbytes, p.cost_s, p.op) for p in step.passes)
            known = step, CallNeeds(calls, step.boundary_nbytes, captured.caller_nbytes)
            captured.__dict__["_needed"] = known
        return known[1]

    @cached_property
    def digest(self) -> str:
        """Of equal needs it is the same."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()

    @staticmethod
    def most(of_all: Sequence[CallNeeds]) -> CallNeeds:
        """The most of each; an operation is that of who needs most there."""
        calls = []
        for of_call in zip(*(needed.calls for needed in of_all), strict=True):
            peak_nbytes, left_nbytes, cost_s, _ = (max(values) for values in zip(*of_call, strict=True))
            op = next(op for nbytes, _, _, op in of_call if nbytes == peak_nbytes)
            calls.append((peak_nbytes, left_nbytes, cost_s, op))
        return CallNeeds(
            tuple(calls),
            max(needed.boundary_nbytes for needed in of_all),
            max(needed.caller_nbytes for needed in of_all),
        )


@dataclass(frozen=True)
class Captured:
    """What compilation made of a graph, before any plan.

    Attributes:
        offloaded: the storages that are at home between forward and backward.
        absence: what is absent in between.
        at_least: what plans are to reckon with, if that is more than it needs.
        graph_fraction: what part of the model it is (see `graph_fraction`).
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

    @property
    def unknown_operators(self) -> tuple[EstimatedOperator, ...]:
        """Every call of an operator whose inner memory is a guess."""
        return unknown_operators(self.programs.values(), self.memories)

    def returning(self, parameters: frozenset[str]) -> Captured:
        """The same graph, with these parameters' gradients returned to autograd instead of sunk."""
        if not parameters or self.backward is None:
            return self
        backward = self.backward
        return self._remembered(
            ("returning", parameters), lambda: replace(self, backward=backward.returning(parameters))
        )

    def leaving_out(self, parameters: frozenset[str]) -> Captured:
        """The same graph, with these parameters' gradients dropped as they are made."""
        if not parameters or self.backward is None:
            return self
        backward = self.backward
        return self._remembered(
            ("leaving out", parameters), lambda: replace(self, backward=backward.leaving_out(parameters))
        )

    def with_sizes(self, nbytes: Callable[[int], int], cost_s: Callable[[float], float]) -> Captured:
        """The same graph with `nbytes` of every number of bytes and `cost_s` of every call's seconds."""
        segments = {
            name: CompiledSegment(segment.run, segment.memory.with_sizes(nbytes))
            for name, segment in self.segments.items()
        }
        backward = None if self.backward is None else self.backward.with_sizes(nbytes, cost_s)
        forward = self.forward.with_sizes(nbytes, cost_s)
        return Captured(forward, backward, segments, self.modules, self.whole, graph_fraction=self.graph_fraction)

    @cached_property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """Tensors that are part of the code itself: they are there for as long as it is."""
        found: dict[int, torch.Tensor] = {}
        for module in self.modules.values():
            for node in module.graph.find_nodes(op="get_attr") if isinstance(module, fx.GraphModule) else ():
                value = attrgetter(str(node.target))(module)
                if isinstance(value, torch.Tensor):
                    found[value.untyped_storage().data_ptr()] = value
        return tuple(found.values())

    def holding(self, tangents: frozenset[str]) -> Captured:
        """The same graph, while the caller keeps these of the backward's tangents."""
        if not tangents or self.backward is None:
            return self
        backward = self.backward
        return self._remembered(("holding", tangents), lambda: replace(self, backward=backward.holding(tangents)))

    def _remembered(self, way: tuple[str, Hashable], make: Callable[[], Captured]) -> Captured:
        """The same graph in a way in which it may be asked for again, with all that is worked out for it."""
        known: dict[tuple[str, Hashable], Captured] = self.__dict__.setdefault("_ways", {})
        if way not in known:
            if len(known) >= MAX_KNOWN:
                known.clear()
            known[way] = make()
        return known[way]

    @cached_property
    def offloadable(self) -> tuple[Saved, ...]:
        """Storages that may be at home between forward and backward. A graph that is compiled whole keeps all: it reads
        them at its very first operation."""
        return () if self.whole else candidates(self.forward, self.backward)

    @cached_property
    def repeatable(self) -> Recomputable | None:
        """What a backward could make again by calling segments once more; None: nothing."""
        return (
            None
            if self.whole or self.backward is None
            else Recomputable(self.forward, self.backward, self.unrepeatable)
        )

    @cached_property
    def unrepeatable(self) -> frozenset[str]:
        """Segments that may not be called again: they draw random numbers, or have other effects."""
        graphs = {name: module.graph for name, module in self.modules.items() if isinstance(module, fx.GraphModule)}
        return frozenset(name for name in self.modules if name not in graphs or not may_recompute(graphs[name]))

    def following(self, activation_plan: ActivationPlan) -> Captured:
        """The same graph, where this is absent between forward and backward."""
        if not activation_plan:
            return self
        return self._remembered(("without", activation_plan), lambda: self._following(activation_plan))

    def _following(self, activation_plan: ActivationPlan) -> Captured:
        lean = self._recomputing(activation_plan.recomputed)
        return lean._offloading(activation_plan.offloaded & {one.storage for one in lean.offloadable})

    def _recomputing(self, storages: frozenset[str]) -> Captured:
        if not storages:
            return self
        assert self.repeatable is not None
        return self._with(*with_recompute(self.repeatable, storages), ActivationPlan(recomputed=storages))

    def _offloading(self, storages: frozenset[str]) -> Captured:
        if not storages:
            return self
        assert self.backward is not None
        forward, backward = with_offloaded(self.forward, storages), with_offloaded(self.backward, storages)
        offloaded = tuple(one for one in self.offloadable if one.storage in storages)
        found = self._with(forward, backward, replace(self.activation_plan, offloaded=storages), offloaded)
        found.__dict__["_kept"] = self
        return found

    def _with(
        self,
        forward: PhaseProgram,
        backward: PhaseProgram,
        activation_plan: ActivationPlan,
        offloaded: tuple[Saved, ...] = (),
    ) -> Captured:
        """The same graph with other phases; what does not depend on them is worked out once for all."""
        found = replace(self, forward=forward, backward=backward, offloaded=offloaded, activation_plan=activation_plan)
        found.__dict__.update(memories=self.memories, _updates=self.__dict__.setdefault("_updates", {}))
        return found

    @cached_property
    def offloadable_inputs(self) -> tuple[int, ...]:
        """Where among the backward's inputs something may stand for a value that is absent."""
        storages = {one.storage for one in self.offloadable}
        inputs = self.backward.inputs.values() if self.backward is not None else ()
        return tuple(place for place, storage in enumerate(inputs) if storage in storages)

    @property
    def extra(self) -> tuple[str, ...]:
        """The forward's values that it returns beside its own outputs, for calls that the backward repeats."""
        outputs = self.forward.outputs
        return tuple(value for value in outputs[len(outputs) - self.forward.num_extra :] if value is not None)

    @property
    def tangents(self) -> tuple[str, ...]:
        """The backward's inputs that are gradients of the forward's outputs; the others were saved for it."""
        if self.backward is None:
            return ()
        num_saved = len(self.forward.outputs) - self.forward.num_user_outputs - self.forward.num_extra
        inputs = tuple(self.backward.inputs)
        return inputs[num_saved : len(inputs) - self.backward.num_extra]

    @property
    def tangent_nbytes(self) -> int:
        """Bytes of the gradients that the backward is given."""
        if self.backward is None:
            return 0
        return sum(self.backward.storages[self.backward.inputs[name]] for name in self.tangents)

    @cached_property
    def memories(self) -> Mapping[str, SegmentMemory]:
        return {name: segment.memory for name, segment in self.segments.items()}

    @property
    def programs(self) -> Mapping[str, PhaseProgram]:
        """The phases there are, by name."""
        return {p.phase: p for p in (self.forward, self.backward) if p is not None}

    @cached_property
    def own_memory(self) -> OwnMemory:
        return OwnMemory.of(self.forward)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Parameters whose gradients the backward makes."""
        return frozenset(name for _, _, name in self.backward.gradient_outputs) if self.backward else frozenset()

    @cached_property
    def _output_sizes(self) -> tuple[int, ...]:
        storage_of = self.forward.value_storages()
        storages = {storage_of[value] for value in self.forward.results} - self.forward.held
        return tuple(self.forward.storages[storage] for storage in storages)

    @property
    def output_nbytes(self) -> int:
        """Bytes the caller gets from the forward, inputs that are returned left out."""
        return sum(self._output_sizes)

    @property
    def loss_nbytes(self) -> int:
        """Those of them that are numbers: a loss is there while its backward runs, all else may be gone by then."""
        return sum(nbytes for nbytes in self._output_sizes if nbytes <= LARGEST_NUMBER_NBYTES)

    @property
    def caller_nbytes(self) -> int:
        """Bytes of a forward that its caller still holds when the optimizer steps: inputs and outputs."""
        return self.forward.external_nbytes + self.output_nbytes

    def external_in_forward(self, live_nbytes: int, given_nbytes: int) -> int:
        """What others hold beside a forward.

        Args:
            live_nbytes: values of earlier calls that are alive, without the storages of this call's inputs. The outputs
                of the call before are the forward's already.
            given_nbytes: of the inputs' storages. An input may be a view of a larger tensor than the one it was traced
                with: all of that is held.
        """
        return max(0, live_nbytes - self.output_nbytes) + max(0, given_nbytes - self.forward.external_nbytes)

    @property
    def saved_nbytes(self) -> int:
        """Bytes saved for the backward alone."""
        return self.between_nbytes - self.caller_nbytes

    @property
    def other_graphs_nbytes(self) -> int:
        """Bytes that the other parts of its model hold meanwhile, if they do for each parameter as this one does."""
        kept_nbytes = self.saved_nbytes - sum(one.nbytes for one in self.offloaded)
        return math.ceil(max(0, kept_nbytes) * (1 / self.graph_fraction - 1))

    @cached_property
    def between_nbytes(self) -> int:
        """Bytes alive between the phases: inputs, outputs and what is saved for the backward."""
        storage_of = self.forward.value_storages()
        kept = self.forward.outputs[self.forward.num_new_buffers :]
        storages = {storage_of[value] for value in kept if value is not None} | self.forward.held
        return sum(self.forward.storages[storage] for storage in storages)


def profile(captured: Captured, layout: ChunkLayout) -> StepProfile:
    """Positions of every phase. In the forward, the previous call's outputs are still the caller's.

    The latest is kept with the captured graph, and the latest beside which gradients are spent: decisions and plans ask
    for the same ones.
    """
    known = captured.__dict__.get("_profile")
    if known is None or known[0] is not layout.groups:
        step = _profile(captured, replace(layout, transient=frozenset()))
        known = captured.__dict__["_profile"] = layout.groups, step, {}
    found: StepProfile = known[1]
    if not layout.transient:
        return found
    transient: dict[frozenset[int], StepProfile] = known[2]
    if layout.transient not in transient:
        transient.clear()
        transient[layout.transient] = replace(found, backward=with_waiting(found.backward, layout))
    return transient[layout.transient]


def _profile(captured: Captured, layout: ChunkLayout) -> StepProfile:
    kept: Captured | None = captured.__dict__.get("_kept")
    if kept is not None and captured.at_least is None:
        return profile(kept, layout).with_offloaded(captured.offloaded)
    group_of = layout.group_of()
    memories = captured.memories
    forward = positions(captured.forward, memories, group_of=group_of, external_nbytes=captured.output_nbytes)
    least = captured.at_least
    if least is not None:
        forward = _at_least(forward, least.calls[: len(forward)])
    if captured.backward is None:
        return StepProfile(forward, (), (), 0)
    backward: tuple[Position, ...] = positions(captured.backward, memories, group_of=group_of)
    if least is not None:
        backward = _at_least(backward, least.calls[len(forward) :])
    trained = tuple(sorted(layout.groups_of(p for c in captured.backward.calls for _, p in c.gradients)))
    updates: dict[tuple[tuple[int, ...], int], tuple[tuple[ChunkGroup, ...], tuple[Position, ...]]]
    caller_nbytes = captured.caller_nbytes if least is None else least.caller_nbytes
    updates, key = captured.__dict__.setdefault("_updates", {}), (trained, caller_nbytes)
    if key not in updates or updates[key][0] is not layout.groups:
        updates[key] = layout.groups, tuple(update_positions(layout, smallest_tiles(layout, trained), key[1]))
    update = updates[key][1]
    boundary_nbytes = captured.between_nbytes + ROOM_FOR_LOSS * captured.output_nbytes
    return StepProfile(forward, backward, update, boundary_nbytes if least is None else least.boundary_nbytes)


def _at_least(positions: Sequence[Position], calls: Sequence[tuple[int, int, float, str]]) -> tuple[Position, ...]:
    """Positions that need what is said of their calls, or more."""
    return tuple(
        replace(
            position,
            non_model_nbytes=max(position.non_model_nbytes, nbytes),
            left_nbytes=max(position.left_nbytes, left_nbytes),
            cost_s=max(position.cost_s, cost_s),
            op=op,
        )
        for position, (nbytes, left_nbytes, cost_s, op) in zip(positions, calls, strict=True)
    )
