"""Saved storages that a forward drops and its backward makes again: the same segments, called with the same values.

Nothing is compiled for it, and bits are the same by construction. What a repeated call reads is kept until then, where
it is not dropped itself: then the call that makes it is repeated, too. Each call is repeated once at most, ahead of the
first call of the backward that reads what it makes. A segment that draws random numbers is never repeated: where
operators run one by one, each that draws is a segment of its own. Of a call
that runs operator by operator, what only makes values for later calls is left out where these are not repeated with it
(`SegmentCall.recompute_call`): a block's last product, say.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import fx

from chunkc.ir.program import RECOMPUTE, PhaseProgram, SegmentCall
from chunkc.passes.graphs.collectives import is_collective
from chunkc.passes.planning.offload import candidates


def may_recompute(segment: fx.Graph) -> bool:
    """Whether a segment run again with the same inputs gives the same bits, and changes nothing else."""
    return all(is_repeatable(node) for node in segment.nodes if node.op == "call_function")


def is_repeatable(node: fx.Node) -> bool:
    """Whether an operation called again with the same inputs gives the same bits, and changes nothing else."""
    if node.target is operator.getitem or getattr(node.target, "__module__", "") in ("_operator", "math"):
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_bitwise in node.target.tags or is_collective(node):
        return False
    return not draws(node)


def draws(node: fx.Node) -> bool:
    """Whether an operator draws random numbers. One with a dropout inside may have none, as attention usually."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0.0)
    return True


@dataclass(frozen=True)
class RecomputePlan:
    """What follows from dropping storages.

    Attributes:
        absent: those that are dropped; `dropped`: the saved ones of them.
        calls: by their indices, the forward's calls that are repeated, as they are then.
        kept: values of the forward, read by these, that stay.
    """

    absent: frozenset[str]
    dropped: frozenset[str]
    calls: Mapping[int, SegmentCall]
    kept: tuple[str, ...]


class Recomputable:
    """A forward with its backward: what may be dropped, and what then follows.

    Args:
        once: segments that may not run again.
    """

    def __init__(self, forward: PhaseProgram, backward: PhaseProgram, once: Collection[str]) -> None:
        self.forward, self.backward = forward, backward
        self.storage_of = forward.value_storages()
        self.maker = {value: at for at, call in enumerate(forward.calls) for value in call.outputs}
        self.first_maker: dict[str, int] = {}
        for at, call in enumerate(forward.calls):
            for storage in call.output_storages:
                self.first_maker.setdefault(storage, at)
        self.last_read = {self.storage_of[v]: at for at, call in enumerate(forward.calls) for v in call.inputs}
        saved = {v for v in forward.outputs[forward.num_user_outputs :] if v is not None}
        returned = {v for v in forward.outputs[: forward.num_user_outputs] if v is not None}
        self.saved = frozenset(saved)
        self.may_repeat = frozenset(at for at, call in enumerate(forward.calls) if self._may_repeat(call, once))
        outside = {self.storage_of[value] for value in saved | returned} | set(forward.inputs.values())
        inner = self.first_maker.keys() - outside - forward.held
        saved_storages = candidates(forward, backward)
        self.first_needed = {one.storage: one.first for one in saved_storages}
        """Saved storage -> the backward's first call that reads it."""
        droppable = {one.storage for one in saved_storages} - set(forward.inputs.values())
        self.droppable = frozenset(s for s in droppable if self.first_maker[s] in self.may_repeat)
        """Saved storages that some call may make again."""
        self.inner = frozenset(s for s in inner if self.first_maker[s] in self.may_repeat)
        """Storages that only the forward reads: dropping them means to repeat further calls instead of keeping them."""

    def _may_repeat(self, call: SegmentCall, once: Collection[str]) -> bool:
        program = self.forward
        read = {call.inputs[place] for place, _ in call.parameters}
        at_home = any(value in program.parameters and value not in read for value in call.inputs)
        return call.segment not in once and not at_home and program.changing.isdisjoint(call.inputs)

    def passed_nbytes(self) -> list[int]:
        """For each call but the first: bytes of what the calls before it make, and it or a later one reads."""
        more = [0] * (len(self.forward.calls) + 1)
        for storage, made in self.first_maker.items():
            if (read := self.last_read.get(storage, -1)) > made:
                more[made + 1] += self.forward.storages[storage]
                more[read + 1] -= self.forward.storages[storage]
        return list(accumulate(more[: len(self.forward.calls)]))[1:]

    def without(self, gone: Iterable[str]) -> RecomputePlan:
        """What follows where these storages are dropped, as far as calls may be repeated for it."""
        absent = frozenset(gone) & (self.droppable | self.inner)
        while (refused := self._follow(absent)) is not None and not isinstance(refused, RecomputePlan):
            absent -= {refused}
        assert isinstance(refused, RecomputePlan)
        return refused

    def _follow(self, absent: frozenset[str]) -> RecomputePlan | str:
        """What follows; a storage: it cannot be dropped with the others."""
        dropped = absent & self.droppable
        waiting = [(self.first_maker[storage], storage) for storage in sorted(dropped)]
        calls: dict[int, SegmentCall] = {}
        kept: dict[str, None] = {}
        while waiting:
            at, wanted = waiting.pop()
            call = whole = self.forward.calls[at]
            if whole.recompute_call is not None and wanted in (
                *whole.recompute_call.outputs,
                *whole.recompute_call.output_storages,
            ):
                call = whole.recompute_call
            if calls.get(at) in (call, whole):
                continue
            calls[at] = call
            for value in call.inputs:
                if (source := self.source(value, absent)) is None:
                    kept.setdefault(value)
                elif source in self.may_repeat:
                    waiting.append((source, self.storage_of[value] if value in self.saved else value))
                else:
                    return self.storage_of[value]
        return RecomputePlan(absent, dropped, calls, tuple(sorted(kept)))

    def source(self, value: str, absent: Collection[str]) -> int | None:
        """The call to repeat for a value that a repeated call reads; None: it is kept."""
        storage = self.storage_of[value]
        if storage not in absent:
            return None
        return self.first_maker[storage] if value in self.saved else self.maker[value]


def with_recompute(known: Recomputable, gone: Collection[str]) -> tuple[PhaseProgram, PhaseProgram]:
    """A forward that drops these storages, and its backward that makes the saved ones of them again."""
    forward, backward = known.forward, known.backward
    found = known.without(gone)
    if not found.dropped:
        return forward, backward
    taken_as = {value: name for name, value in backward.saved_as.items() if value is not None}
    extra = [value for value in found.kept if value not in taken_as]
    return _dropping(forward, found, extra), _repeating(known, found, taken_as, extra)


def _dropping(forward: PhaseProgram, found: RecomputePlan, extra: Collection[str]) -> PhaseProgram:
    storage_of, outputs = forward.value_storages(), list(forward.outputs)
    remade: dict[str, list[str]] = {}
    stand_ins = dict(forward.stand_ins)
    for position, value in enumerate(forward.outputs):
        if position >= forward.num_user_outputs and value is not None and storage_of[value] in found.dropped:
            values = remade.setdefault(storage_of[value], [])
            stand_ins[position] = storage_of[value], len(values)
            values.append(value)
            outputs[position] = None
    return replace(
        forward,
        outputs=(*outputs, *extra),
        stand_ins=stand_ins,
        remade={storage: tuple(values) for storage, values in remade.items()},
        num_extra=len(extra),
    )


def _repeating(
    known: Recomputable, found: RecomputePlan, taken_as: Mapping[str, str], extra: Collection[str]
) -> PhaseProgram:
    forward, backward, storage_of = known.forward, known.backward, known.storage_of
    remade: dict[str, list[str]] = {}
    for name, storage in backward.inputs.items():
        if storage in found.dropped:
            remade.setdefault(storage, []).append(name)
    kept = {value: taken_as.get(value, f"kept_{value}") for value in found.kept}
    assert backward.inputs.keys().isdisjoint(kept[value] for value in extra)
    inputs = {**backward.inputs, **{kept[value]: storage_of[value] for value in extra}}
    again = _Again(known, found, kept, taken_as)
    calls: list[SegmentCall] = []
    done: set[int] = set()
    for call in backward.calls:
        for at in again.needed({inputs[v] for v in call.inputs if v in inputs} & found.dropped, done):
            calls.append(again.call(at))
            done.add(at)
        calls.append(call)
    storages = {**{storage_of[value]: forward.storages[storage_of[value]] for value in extra}, **backward.storages}
    storages |= {name: forward.storages[storage] for storage, name in again.named.items()}
    parameters = {kept[value]: forward.parameters[value] for value in extra if value in forward.parameters}
    return replace(
        backward,
        inputs=inputs,
        storages=storages,
        parameters={**backward.parameters, **parameters},
        calls=tuple(calls),
        remade={storage: tuple(names) for storage, names in remade.items()},
        num_extra=len(extra),
    )


class _Again:
    """The repeated calls of a backward.

    Attributes:
        named: storage of the forward -> what the backward calls what is made again of it.
    """

    def __init__(
        self, known: Recomputable, found: RecomputePlan, kept: Mapping[str, str], taken_as: Mapping[str, str]
    ) -> None:
        self._known, self._found, self._kept, self._taken_as = known, found, kept, taken_as
        self.named: dict[str, str] = {}

    def needed(self, storages: Collection[str], done: Collection[int]) -> list[int]:
        """The calls to repeat ahead of one that reads these storages, in the forward's order."""
        waiting = [self._known.first_maker[storage] for storage in storages]
        found: set[int] = set()
        while waiting:
            at = waiting.pop()
            if at in found or at in done:
                continue
            found.add(at)
            sources = (self._known.source(v, self._found.absent) for v in self._found.calls[at].inputs)
            waiting += [source for source in sources if source is not None]
        return sorted(found)

    def call(self, at: int) -> SegmentCall:
        call = self._found.calls[at]
        return replace(
            call,
            name=f"{RECOMPUTE}{call.name[call.name.rindex('.') :]}",
            inputs=tuple(map(self._value, call.inputs)),
            outputs=tuple(f"again_{value}" for value in call.outputs),
            output_storages=tuple(self._storage(storage, at) for storage in call.output_storages),
            recompute_call=None,
        )

    def _value(self, value: str) -> str:
        if self._known.source(value, self._found.absent) is None:
            return self._kept[value]
        dropped = self._known.storage_of[value] in self._found.dropped
        return self._taken_as[value] if dropped and value in self._known.saved else f"again_{value}"

    def _storage(self, storage: str, at: int) -> str:
        """What a repeated call makes is a storage of its own, where the forward's is not dropped."""
        if storage in self._found.dropped:
            return storage
        if storage in self._found.absent or self._known.first_maker.get(storage) == at:
            return self.named.setdefault(storage, f"again:{storage}")
        return storage
