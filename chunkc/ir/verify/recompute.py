"""Verify storages that a forward drops and its backward recomputes, by repeating calls of the forward.

rerun     every call gets the values that the captured program gives it, and no placeholder: a repeated call is a call
of the forward, of the same segment, or of one that computes some of its results by the same operations, with the same
values, none of which has changed since; no segment that draws random numbers, or has another effect, is called twice; a
dropped storage is recomputed before it is read; all that repeated calls read of the forward is handed to the backward,
and offloaded storages among it are back before they read them

In both graphs every value is traced to a value of the captured programs, in which nothing is dropped or offloaded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc.ir import chunk_ops
from chunkc.ir.items import SavedStorage
from chunkc.ir.program import FORWARD, PhaseProgram, SegmentCall

ValueId = tuple[str, str]
"""Identity of a value: (phase, its name there), or ("parameter", its name)."""


@dataclass(frozen=True)
class RecomputeSpec:
    """Saved storages of a step as its plan treats them.

    Attributes:
        remade: storage -> the forward's saved values in it, for recomputed storages.
        extra: values of the forward that it returns after its own outputs, and that the backward takes.
        offloaded: storages that are copied home.
    """

    remade: Mapping[str, Sequence[str]]
    extra: Sequence[str]
    offloaded: Collection[str] = frozenset()


def verify_recompute(
    graphs: Mapping[str, fx.GraphModule],
    programs: Mapping[str, PhaseProgram],
    modules: Mapping[str, torch.nn.Module],
    spec: RecomputeSpec,
) -> list[str]:
    """Check a step's rewritten graphs against the captured programs and their segments; return the violations."""
    violations: list[str] = []
    for phase, graph in graphs.items():
        violations += _Tracer(graph, programs, phase, modules, spec).violations()
    return violations


class _Tracer:
    """Walk over one rewritten graph that traces each node to a value of the captured programs."""

    def __init__(
        self,
        graph: fx.GraphModule,
        programs: Mapping[str, PhaseProgram],
        phase: str,
        modules: Mapping[str, torch.nn.Module],
        spec: RecomputeSpec,
    ) -> None:
        self._graph, self._programs, self._phase, self._spec = graph, programs, phase, spec
        self._modules = modules
        self._forward = programs[FORWARD]
        self._calls = {call.name: call for program in programs.values() for call in program.calls}
        self._storage_of = self._forward.value_storages
        self._values: dict[fx.Node, ValueId] = {}
        self._placeholders: dict[fx.Node, ValueId] = {}  # -> the value that is offloaded or dropped
        self._repeated: set[fx.Node] = set()  # results of repeated calls
        self._violations: list[str] = []

    def violations(self) -> list[str]:
        num_inputs = 0
        for node in self._graph.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, num_inputs)
                num_inputs += 1
            elif node.op == "call_module":
                self._call(node)
            elif node.target is chunk_ops.parameter:
                self._values[node] = ("parameter", str(node.args[1]))
            elif node.target in _HANDLERS and isinstance(node.args[0], SavedStorage):
                _HANDLERS[node.target](self, node, *node.args)
            elif node.op == "output" and self._phase == FORWARD:
                self._returned(node)
        return self._violations

    def _fail(self, node: fx.Node, text: str) -> None:
        self._violations.append(f"rerun at {node.name}: {text}")

    def _value(self, phase: str, name: str) -> ValueId:
        parameter = self._programs[phase].parameters.get(name)
        return (phase, name) if parameter is None else ("parameter", parameter)

    def _placeholder(self, node: fx.Node, place: int) -> None:
        program = self._programs[self._phase]
        names = list(program.inputs)
        if place >= len(names):
            extra = self._spec.extra
            if place - len(names) < len(extra):
                self._values[node] = self._value(FORWARD, extra[place - len(names)])
            return
        name = names[place]
        saved = program.saved_as.get(name)
        value = self._value(self._phase, name) if saved is None else self._value(FORWARD, saved)
        is_present = node.meta["storage"][0] == program.inputs[name]
        if is_present and saved is not None and self._storage_of[saved] in self._spec.remade:
            self._fail(node, f"{saved} was dropped, but is passed in as a value")
        is_offloaded = saved is not None and self._storage_of[saved] in self._spec.offloaded
        (self._values if is_present and not is_offloaded else self._placeholders)[node] = value

    def _call(self, node: fx.Node) -> None:
        name = str(node.meta["call"])
        is_repeated = name not in self._calls
        source = f"{FORWARD}{name[name.rindex('.') :]}" if is_repeated else name
        call = self._calls.get(source)
        if call is None or (is_repeated and self._phase == FORWARD):
            return self._fail(node, f"{name} is no call of the captured programs")
        phase = FORWARD if is_repeated else self._phase
        if is_repeated:
            self._repeat(node, call)
        outputs: Sequence[str | None] = call.outputs
        if is_repeated and str(node.target) != call.segment:
            outputs = self._results(node, call)
        elif str(node.target) != call.segment or len(node.args) != len(call.inputs):
            self._fail(node, f"{name} calls {node.target}, but {source} calls {call.segment}")
        else:
            for value, expected in zip(node.args, call.inputs):
                self._read(node, value, self._expected(phase, expected))
        for output in node.users:
            result = outputs[output.args[1]]  # type: ignore[index]
            self._values[output] = ("", "") if result is None else (phase, result)
            if is_repeated:
                self._repeated.add(output)

    def _results(self, node: fx.Node, call: SegmentCall) -> list[str | None]:
        """Return the names of a repeated call's results in the original call, for a call of another segment."""
        for value in node.args:
            if value in self._placeholders:
                name = self._placeholders[value][1]  # type: ignore[index]
                self._fail(node, f"{value} is read, but is only the placeholder of {name}")
        numbers: dict[Any, int] = {}
        inputs = [self._values.get(value) for value in node.args]  # type: ignore[arg-type]
        repeated = _computed(self._graph.get_submodule(str(node.target)), inputs, numbers)
        expected = [self._expected(FORWARD, name) for name in call.inputs]
        original = _computed(self._modules[call.segment], expected, numbers)
        names = dict(zip(original, call.outputs))
        if not repeated or not names.keys() >= set(repeated):
            self._fail(node, f"{node.target} computes other values than {call.segment}, which {call.name} calls")
            return [None] * len(node.users)
        return [names[number] for number in repeated]

    def _expected(self, phase: str, name: str) -> ValueId:
        saved = self._programs[phase].saved_as.get(name)
        return self._value(phase, name) if saved is None else self._value(FORWARD, saved)

    def _read(self, node: fx.Node, value: Any, expected: ValueId) -> None:
        if value in self._placeholders:
            self._fail(node, f"{value} is read, but is only the placeholder of {self._placeholders[value][1]}")
        elif self._values.get(value) != expected:
            self._fail(node, f"{value} is {self._values.get(value)}, but {expected} should be read")

    def _repeat(self, node: fx.Node, call: SegmentCall) -> None:
        segment = self._graph.get_submodule(str(node.target))
        if not isinstance(segment, fx.GraphModule) or any(map(_has_effect, segment.graph.nodes)):
            self._fail(node, f"{call.segment} draws random numbers, or has an effect, but is called again")
        for value in self._forward.changing.intersection(call.inputs):
            self._fail(node, f"{value}, which {call.name} has read, has changed since")

    def on_evict(self, node: fx.Node, item: SavedStorage, *values: fx.Node) -> None:
        """Check what is dropped; of what is offloaded, `SavedStorages` checks when it moves."""
        expected = self._spec.remade.get(str(item), ())
        is_dropped = str(item) not in self._spec.offloaded
        if is_dropped and [self._values.get(value) for value in values] != [(FORWARD, name) for name in expected]:
            self._fail(node, f"{item} is dropped with other values than {list(expected)}")
        for output in node.users:
            self._placeholders[output] = self._identity(values[output.args[1]])  # type: ignore[index]

    def on_wait(self, node: fx.Node, item: SavedStorage, link: str, *prefetched: fx.Node) -> None:
        for output in node.users:
            self._values[output] = self._identity(prefetched[0].args[3:][output.args[1]])  # type: ignore[index, arg-type]

    def on_recompute(self, node: fx.Node, item: SavedStorage, computed: fx.Node, *placeholders: fx.Node) -> None:
        value = self._values.get(computed)
        if computed not in self._repeated or value is None or self._storage_of.get(value[1]) != str(item):
            self._fail(node, f"{computed} was not recomputed in {item}")
        expected = [(FORWARD, name) for name in self._spec.remade.get(str(item), ())]
        if [self._placeholders.get(placeholder) for placeholder in placeholders] != expected:
            self._fail(node, f"not all placeholders are of values in {item}")
        for output in node.users:
            self._values[output] = self._placeholders.get(placeholders[output.args[1]], ("", ""))  # type: ignore[index]

    def _identity(self, node: fx.Node) -> ValueId:
        return self._values.get(node, self._placeholders.get(node, ("", "")))

    def _returned(self, node: fx.Node) -> None:
        (values,) = node.args
        assert isinstance(values, tuple)
        expected = [*self._forward.outputs, *self._spec.extra]
        if len(values) != len(expected):
            return self._fail(node, f"{len(values)} values are returned, but {len(expected)} should be")
        for place, (value, name) in enumerate(zip(values, expected)):
            identity = self._identity(value)
            may_be_placeholder = self._forward.num_user_outputs <= place < len(self._forward.outputs)
            if name is not None and (
                identity != self._value(FORWARD, name) or (value in self._placeholders and not may_be_placeholder)
            ):
                self._fail(node, f"{value} is returned as {name}")


_HANDLERS: Mapping[object, Callable[..., None]] = {
    chunk_ops.evict: _Tracer.on_evict,
    chunk_ops.wait: _Tracer.on_wait,
    chunk_ops.recompute: _Tracer.on_recompute,
}


def _computed(segment: torch.nn.Module, inputs: Sequence[ValueId | None], numbers: dict[Any, int]) -> list[int]:
    """Number each result of a segment: equal numbers for the same operations on the same values."""
    number: dict[fx.Node, int] = {}
    remaining = iter(inputs)
    if not isinstance(segment, fx.GraphModule):
        return []
    for node in segment.graph.nodes:
        if node.op == "output":
            return [number[value] for value in node.args[0] if value is not None]
        key: Any
        if node.op == "placeholder":
            key = next(remaining, None)
        elif node.op == "get_attr":
            key = id(operator.attrgetter(str(node.target))(segment))
        else:
            operands = fx.map_arg((node.args, node.kwargs), lambda source: f"%{number[source]}")
            key = node.target, repr(operands)
        number[node] = numbers.setdefault(key, len(numbers))
    return []


def _has_effect(node: fx.Node) -> bool:
    """Whether an operation may differ between two runs, or changes its arguments."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", "") not in ("_operator", "math")
    if target.namespace in ("_c10d_functional", "_dtensor"):  # a rendezvous of ranks
        return True
    arguments = {argument.name: place for place, argument in enumerate(target._schema.arguments)}
    if "dropout_p" in arguments:  # of attention, which draws only for dropout
        place = arguments["dropout_p"]
        dropout_p = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
        return bool(dropout_p != 0.0)
    tags = {torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise}
    return bool(tags.intersection(target.tags)) or target._schema.is_mutable
