"""Drop saved storages in a forward and recompute them in its backward: the same segments, called with the same values.

Nothing is compiled for it, and bits are the same by construction. Inputs of a repeated call are kept until then, unless
they are dropped themselves: then the call that computes them is repeated, too. Each call is repeated once at most,
ahead of the first call of the backward that reads its results. A segment that draws random numbers is never repeated:
where operators run one by one, each that draws is a segment of its own. Of a call that runs operator by operator,
operations that only compute values for later calls are left out if these are not repeated with it
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
    """Whether a segment, repeated with the same inputs, gives the same bits, and changes nothing else."""
    return all(is_repeatable(node) for node in segment.nodes if node.op == "call_function")


def is_repeatable(node: fx.Node) -> bool:
    """Whether an operation, repeated with the same inputs, gives the same bits, and changes nothing else."""
    if node.target is operator.getitem or getattr(node.target, "__module__", "") in ("_operator", "math"):
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_bitwise in node.target.tags or is_collective(node):
        return False
    return not draws(node)


def draws(node: fx.Node) -> bool:
    """Whether an operator draws random numbers. With an inner dropout it may draw none, as attention usually does."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            default = node.kwargs.get("dropout_p", argument.default_value)
            dropout_p = node.args[place] if place < len(node.args) else default
            return bool(dropout_p != 0.0)
    return True


@dataclass(frozen=True)
class RecomputePlan:
    """Repeated calls and kept values of a step that drops storages.

    Attributes:
        dropped: all dropped storages; `saved`: the saved storages among them.
        calls: by their indices, the forward's calls that are repeated, in the form in which they are.
        kept: values of the forward that these calls read, and that are kept.
    """

    dropped: frozenset[str]
    saved: frozenset[str]
    calls: Mapping[int, SegmentCall]
    kept: tuple[str, ...]


class Recomputable:
    """Storages of a forward and its backward that may be dropped, and the calls to repeat for them.

    Args:
        once: segments that may not be repeated.
    """

    def __init__(self, forward: PhaseProgram, backward: PhaseProgram, once: Collection[str]) -> None:
        self.forward, self.backward = forward, backward
        self.storage_of = forward.value_storages
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
        self.first_needed = {saved.storage: saved.first for saved in saved_storages}
        """Saved storage -> the backward's first call that reads it."""
        droppable = {saved.storage for saved in saved_storages} - set(forward.inputs.values())
        self.droppable = frozenset(s for s in droppable if self.first_maker[s] in self.may_repeat)
        """Saved storages that some call may recompute."""
        self.inner = frozenset(s for s in inner if self.first_maker[s] in self.may_repeat)
        """Storages that only the forward reads: to drop them, further calls are repeated instead."""

    def _may_repeat(self, call: SegmentCall, once: Collection[str]) -> bool:
        program = self.forward
        read = {call.inputs[place] for place, _ in call.parameters}
        reads_home = any(value in program.parameters and value not in read for value in call.inputs)
        return call.segment not in once and not reads_home and program.changing.isdisjoint(call.inputs)

    def passed_nbytes(self) -> list[int]:
        """Return for each call but the first: bytes that calls before it compute, and it or a later one reads."""
        more = [0] * (len(self.forward.calls) + 1)
        for storage, made in self.first_maker.items():
            if (read := self.last_read.get(storage, -1)) > made:
                more[made + 1] += self.forward.storages[storage]
                more[read + 1] -= self.forward.storages[storage]
        return list(accumulate(more[: len(self.forward.calls)]))[1:]

    def without(self, storages: Iterable[str]) -> RecomputePlan:
        """Plan to drop these storages, as far as calls may be repeated for it."""
        dropped = frozenset(storages) & (self.droppable | self.inner)
        while not isinstance(plan := self._follow(dropped), RecomputePlan):
            dropped -= {plan}
        return plan

    def _follow(self, dropped: frozenset[str]) -> RecomputePlan | str:
        """Plan to drop these storages, or return a storage that cannot be dropped with the rest."""
        saved = dropped & self.droppable
        waiting = [(self.first_maker[storage], storage) for storage in sorted(saved)]
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
                if (source := self.source(value, dropped)) is None:
                    kept.setdefault(value)
                elif source in self.may_repeat:
                    waiting.append((source, self.storage_of[value] if value in self.saved else value))
                else:
                    return self.storage_of[value]
        return RecomputePlan(dropped, saved, calls, tuple(sorted(kept)))

    def source(self, value: str, dropped: Collection[str]) -> int | None:
        """Return the call to repeat for a value that a repeated call reads; None: the value is kept."""
        storage = self.storage_of[value]
        if storage not in dropped:
            return None
        return self.first_maker[storage] if value in self.saved else self.maker[value]


def with_recompute(recomputable: Recomputable, storages: Collection[str]) -> tuple[PhaseProgram, PhaseProgram]:
    """Return a forward that drops these storages, and its backward that recomputes the saved ones of them."""
    forward, backward = recomputable.forward, recomputable.backward
    plan = recomputable.without(storages)
    if not plan.saved:
        return forward, backward
    taken_as = {value: name for name, value in backward.saved_as.items() if value is not None}
    extra = [value for value in plan.kept if value not in taken_as]
    return _dropping(forward, plan, extra), _repeating(recomputable, plan, taken_as, extra)


def _dropping(forward: PhaseProgram, plan: RecomputePlan, extra: Collection[str]) -> PhaseProgram:
    forward, remade = forward.with_stand_ins(plan.saved)
    return replace(forward, outputs=(*forward.outputs, *extra), remade=remade, num_extra=len(extra))


def _repeating(
    recomputable: Recomputable, plan: RecomputePlan, taken_as: Mapping[str, str], extra: Collection[str]
) -> PhaseProgram:
    forward, backward, storage_of = recomputable.forward, recomputable.backward, recomputable.storage_of
    remade: dict[str, list[str]] = {}
    for name, storage in backward.inputs.items():
        if storage in plan.saved:
            remade.setdefault(storage, []).append(name)
    kept = {value: taken_as.get(value, f"kept_{value}") for value in plan.kept}
    assert backward.inputs.keys().isdisjoint(kept[value] for value in extra)
    inputs = {**backward.inputs, **{kept[value]: storage_of[value] for value in extra}}
    recompute_calls = _RecomputeCalls(recomputable, plan, kept, taken_as)
    calls: list[SegmentCall] = []
    done: set[int] = set()
    for call in backward.calls:
        for at in recompute_calls.needed({inputs[v] for v in call.inputs if v in inputs} & plan.saved, done):
            calls.append(recompute_calls.call(at))
            done.add(at)
        calls.append(call)
    storages = {**{storage_of[value]: forward.storages[storage_of[value]] for value in extra}, **backward.storages}
    storages |= {name: forward.storages[storage] for storage, name in recompute_calls.named.items()}
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


class _RecomputeCalls:
    """Repeated calls of a backward.

    Attributes:
        named: storage of the forward -> name of its recomputed copy in the backward.
    """

    def __init__(
        self, recomputable: Recomputable, plan: RecomputePlan, kept: Mapping[str, str], taken_as: Mapping[str, str]
    ) -> None:
        self._recomputable, self._plan, self._kept, self._taken_as = recomputable, plan, kept, taken_as
        self.named: dict[str, str] = {}

    def needed(self, storages: Collection[str], done: Collection[int]) -> list[int]:
        """Return the calls to repeat ahead of one that reads these storages, in the forward's order."""
        waiting = [self._recomputable.first_maker[storage] for storage in storages]
        needed: set[int] = set()
        while waiting:
            at = waiting.pop()
            if at in needed or at in done:
                continue
            needed.add(at)
            sources = (self._recomputable.source(v, self._plan.dropped) for v in self._plan.calls[at].inputs)
            waiting += [source for source in sources if source is not None]
        return sorted(needed)

    def call(self, at: int) -> SegmentCall:
        call = self._plan.calls[at]
        return replace(
            call,
            name=f"{RECOMPUTE}{call.name[call.name.rindex('.') :]}",
            inputs=tuple(map(self._value, call.inputs)),
            outputs=tuple(f"again_{value}" for value in call.outputs),
            output_storages=tuple(self._storage(storage, at) for storage in call.output_storages),
            recompute_call=None,
        )

    def _value(self, value: str) -> str:
        if self._recomputable.source(value, self._plan.dropped) is None:
            return self._kept[value]
        is_saved = self._recomputable.storage_of[value] in self._plan.saved and value in self._recomputable.saved
        return self._taken_as[value] if is_saved else f"again_{value}"

    def _storage(self, storage: str, at: int) -> str:
        """Return the storage of a repeated call's result: a new one, unless the forward's is dropped."""
        if storage in self._plan.saved:
            return storage
        if storage in self._plan.dropped or self._recomputable.first_maker.get(storage) == at:
            return self.named.setdefault(storage, f"again:{storage}")
        return storage
