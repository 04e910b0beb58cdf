"""The verifier's rule for storages that a forward drops and its backward makes again, by calls of the forward repeated.

rerun     every call gets the values that the captured program gives it, and none that is absent: what is repeated is
          a call of the forward, of the same segment, or of one that computes some of its results by the same
          operations, with the same values, none of which has changed since; no segment that draws random numbers, or
          has another effect, is called twice; what is dropped is made again before it is read; all that repeated
          calls read of the forward is handed to the backward, and what of it went home is back before they read it

Of both graphs every value is traced to what it is in the captured programs, of which nothing is absent.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc.ir import chunk_ops
from chunkc.ir.program import FORWARD, PhaseProgram, SegmentCall

What = tuple[str, str]
"""What a value is: (phase, its name there), or ("parameter", its name)."""


@dataclass(frozen=True)
class Dropped:
    """What a plan says of a step.

    Attributes:
        remade: storage -> the forward's saved values in it, for those dropped and made again.
        extra: values of the forward that it returns beside its own outputs, and that the backward takes.
        home: storages that are copied home.
    """

    remade: Mapping[str, Sequence[str]]
    extra: Sequence[str]
    home: Collection[str] = frozenset()


def verify_recompute(
    graphs: Mapping[str, fx.GraphModule],
    programs: Mapping[str, PhaseProgram],
    modules: Mapping[str, torch.nn.Module],
    dropped: Dropped,
) -> list[str]:
    """Check a step's rewritten graphs against the captured programs and their segments; the violations found."""
    found: list[str] = []
    for phase, graph in graphs.items():
        found += _Tracer(graph, programs, phase, modules, dropped).violations()
    return found


class _Tracer:
    def __init__(
        self,
        graph: fx.GraphModule,
        programs: Mapping[str, PhaseProgram],
        phase: str,
        modules: Mapping[str, torch.nn.Module],
        dropped: Dropped,
    ) -> None:
        self._graph, self._programs, self._phase, self._dropped = graph, programs, phase, dropped
        self._modules = modules
        self._forward = programs[FORWARD]
        self._calls = {call.name: call for program in programs.values() for call in program.calls}
        self._storage_of = self._forward.value_storages()
        self._is: dict[fx.Node, What] = {}
        self._absent: dict[fx.Node, What] = {}  # what stands for a value -> that value
        self._repeated: set[fx.Node] = set()  # values that repeated calls have made
        self._found: list[str] = []

    def violations(self) -> list[str]:
        given = 0
        for node in self._graph.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, given)
                given += 1
            elif node.op == "call_module":
                self._call(node)
            elif node.target is chunk_ops.parameter:
                self._is[node] = ("parameter", str(node.args[1]))
            elif node.target is chunk_ops.forget:
                self._forget(node)
            elif node.target is chunk_ops.again:
                self._again(node)
            elif node.target is operator.getitem and node.args[0].target in (chunk_ops.arrive, chunk_ops.leave):
                self._copied(node)
            elif node.op == "output" and self._phase == FORWARD:
                self._returned(node)
        return self._found

    def _fail(self, node: fx.Node, text: str) -> None:
        self._found.append(f"rerun at {node.name}: {text}")

    def _value(self, phase: str, name: str) -> What:
        parameter = self._programs[phase].parameters.get(name)
        return (phase, name) if parameter is None else ("parameter", parameter)

    def _placeholder(self, node: fx.Node, place: int) -> None:
        program = self._programs[self._phase]
        names = list(program.inputs)
        if place >= len(names):
            extra = self._dropped.extra
            if place - len(names) < len(extra):
                self._is[node] = self._value(FORWARD, extra[place - len(names)])
            return
        name = names[place]
        saved = program.saved_as.get(name)
        what = self._value(self._phase, name) if saved is None else self._value(FORWARD, saved)
        is_there = node.meta["storage"][0] == program.inputs[name]
        if is_there and saved is not None and self._storage_of[saved] in self._dropped.remade:
            self._fail(node, f"{saved} was dropped, and is taken for a value")
        is_home = saved is not None and self._storage_of[saved] in self._dropped.home
        (self._is if is_there and not is_home else self._absent)[node] = what

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
            self._fail(node, f"{name} calls {node.target}, and {source} calls {call.segment}")
        else:
            for value, expected in zip(node.args, call.inputs):
                self._read(node, value, self._expected(phase, expected))
        for output in node.users:
            made = outputs[output.args[1]]  # type: ignore[index]
            self._is[output] = ("", "") if made is None else (phase, made)
            if is_repeated:
                self._repeated.add(output)

    def _results(self, node: fx.Node, call: SegmentCall) -> list[str | None]:
        """What a repeated call of another segment makes: of each of its results, which of the call's it is."""
        for value in node.args:
            if value in self._absent:
                self._fail(node, f"{value} is read, which only stands for {self._absent[value][1]}")  # type: ignore[index]
        numbers: dict[Any, int] = {}
        given = [self._is.get(value) for value in node.args]  # type: ignore[arg-type]
        made = _computed(self._graph.get_submodule(str(node.target)), given, numbers)
        expected = [self._expected(FORWARD, name) for name in call.inputs]
        whole = _computed(self._modules[call.segment], expected, numbers)
        names = dict(zip(whole, call.outputs))
        if not made or not names.keys() >= set(made):
            self._fail(node, f"{node.target} computes something else, and {call.name} calls {call.segment}")
            return [None] * len(node.users)
        return [names[number] for number in made]

    def _expected(self, phase: str, name: str) -> What:
        saved = self._programs[phase].saved_as.get(name)
        return self._value(phase, name) if saved is None else self._value(FORWARD, saved)

    def _read(self, node: fx.Node, value: Any, expected: What) -> None:
        if value in self._absent:
            self._fail(node, f"{value} is read, which only stands for {self._absent[value][1]}")
        elif self._is.get(value) != expected:
            self._fail(node, f"{value} is {self._is.get(value)}, and {expected} should be read")

    def _repeat(self, node: fx.Node, call: SegmentCall) -> None:
        segment = self._graph.get_submodule(str(node.target))
        if not isinstance(segment, fx.GraphModule) or any(map(_has_effect, segment.graph.nodes)):
            self._fail(node, f"{call.segment} draws random numbers, or has an effect, and is called again")
        for value in self._forward.changing.intersection(call.inputs):
            self._fail(node, f"{value}, which {call.name} has read, has changed since")

    def _forget(self, node: fx.Node) -> None:
        storage, *values = node.args
        expected = self._dropped.remade.get(str(storage), ())
        if [self._is.get(value) for value in values] != [(FORWARD, name) for name in expected]:  # type: ignore[arg-type]
            self._fail(node, f"{storage} is dropped with other values than {list(expected)}")
        for output in node.users:
            self._absent[output] = (FORWARD, expected[output.args[1]])  # type: ignore[index]

    def _again(self, node: fx.Node) -> None:
        storage, made, *stand_ins = node.args
        what = self._is.get(made)  # type: ignore[arg-type]
        if made not in self._repeated or what is None or self._storage_of.get(what[1]) != storage:
            self._fail(node, f"{made} was not made again in {storage}")
        expected = [(FORWARD, name) for name in self._dropped.remade.get(str(storage), ())]
        if [self._absent.get(one) for one in stand_ins] != expected:  # type: ignore[arg-type]
            self._fail(node, f"not all that is there again stands for values in {storage}")
        for output in node.users:
            self._is[output] = self._absent.get(stand_ins[output.args[1]], ("", ""))  # type: ignore[index, arg-type]

    def _what(self, value: fx.Node) -> What:
        return self._is.get(value, self._absent.get(value, ("", "")))

    def _copied(self, node: Any) -> None:
        """What left for home, or came back: `verify_saved` knows when; here it is what it was."""
        copy, index = node.args[0], node.args[1]
        if copy.target is chunk_ops.leave:
            self._absent[node] = self._what(copy.args[2 + index])
        else:
            self._is[node] = self._what(copy.args[2].args[3 + index])

    def _returned(self, node: fx.Node) -> None:
        (values,) = node.args
        assert isinstance(values, tuple)
        expected = [*self._forward.outputs, *self._dropped.extra]
        if len(values) != len(expected):
            return self._fail(node, f"{len(values)} values are returned, and {len(expected)} should be")
        for place, (value, name) in enumerate(zip(values, expected)):
            what = self._what(value)
            may_be_absent = self._forward.num_user_outputs <= place < len(self._forward.outputs)
            if name is not None and (
                what != self._value(FORWARD, name) or (value in self._absent and not may_be_absent)
            ):
                self._fail(node, f"{value} is returned as {name}")


def _computed(segment: torch.nn.Module, given: Sequence[What | None], numbers: dict[Any, int]) -> list[int]:
    """Of each result of a segment a number: equal for what the same operations make of the same values."""
    number: dict[fx.Node, int] = {}
    inputs = iter(given)
    if not isinstance(segment, fx.GraphModule):
        return []
    for node in segment.graph.nodes:
        if node.op == "output":
            return [number[value] for value in node.args[0] if value is not None]
        key: Any
        if node.op == "placeholder":
            key = next(inputs, None)
        elif node.op == "get_attr":
            key = id(operator.attrgetter(str(node.target))(segment))
        else:
            operands = fx.map_arg((node.args, node.kwargs), lambda source: f"%{number[source]}")
            key = node.target, repr(operands)
        number[node] = numbers.setdefault(key, len(numbers))
    return []


def _has_effect(node: fx.Node) -> bool:
    """Whether an operation is not the same each time it runs, or changes what it is given."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", "") not in ("_operator", "math")
    if target.namespace in ("_c10d_functional", "_dtensor"):  # ranks meet in it
        return True
    arguments = {argument.name: place for place, argument in enumerate(target._schema.arguments)}
    if "dropout_p" in arguments:  # of attention, which draws for nothing else
        place = arguments["dropout_p"]
        given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
        return bool(given != 0.0)
    tags = {torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise}
    return bool(tags.intersection(target.tags)) or target._schema.is_mutable
