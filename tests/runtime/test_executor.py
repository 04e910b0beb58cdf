"""The executor: hand-made rewritten graphs, lowered and run."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from chunkc.ir import chunk_ops
from chunkc.ir.chunks import ChunkGroup, ChunkLayout, ParamSpec, TensorSlice
from chunkc.ir.errors import ChunkStateError, HomeError
from chunkc.ir.plan import Tile
from chunkc.runtime import cpu_allocator
from chunkc.runtime.arena import Arena
from chunkc.runtime.executor import Executable, Measurement, Run, lower
from chunkc.runtime.homes import MemoryHome
from chunkc.runtime.store import ChunkStore
from chunkc.runtime.tier import CpuTier

pytestmark = pytest.mark.timeout(30)

MIB = 1 << 20
WIDTH = 4


def make_store(*names: str) -> tuple[ChunkStore, dict[str, nn.Parameter]]:
    """Square parameters of the given names, each the only one of its group, filled with 1, 2, ..."""
    parameters = {name: nn.Parameter(torch.full((WIDTH, WIDTH), i + 1.0)) for i, name in enumerate(names)}
    groups = tuple(
        ChunkGroup(i, p.dtype, True, 64, (TensorSlice(ParamSpec(n, (WIDTH, WIDTH), (WIDTH, 1), p.dtype, True), 0),))
        for i, (n, p) in enumerate(parameters.items())
    )
    store = ChunkStore(ChunkLayout(0, (), ()), Arena(MemoryHome()), CpuTier(), debug=True)
    store.place(ChunkLayout(4096, groups, ()), parameters, frozenset())
    return store, parameters


class Builder:
    """A rewritten graph, node by node."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def event(self, kind: str, *chunks: str) -> None:
        for chunk in chunks:
            self.graph.call_function(getattr(chunk_ops, kind), (chunk,))

    def fetch(self, *chunks: str) -> None:
        self.event("prefetch", *chunks)
        self.event("wait", *chunks)

    def put_back(self, chunk: str) -> None:
        for kind in ("write_back", "wait", "evict"):
            self.event(kind, chunk)

    def parameter(self, chunk: str, name: str) -> fx.Node:
        return self.graph.call_function(chunk_ops.parameter, (chunk, name))

    def call(self, segment: str, *arguments: fx.Node, num_outputs: int = 1) -> list[fx.Node]:
        node = self.graph.call_module(segment, arguments)
        node.meta["call"] = f"call_{segment}"
        return [self.graph.call_function(operator.getitem, (node, i)) for i in range(num_outputs)]

    def sink(self, name: str, chunk: str | None, gradient: fx.Node, owned: bool = True) -> None:
        self.graph.call_function(chunk_ops.sink, (name, chunk, gradient, owned))


def boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """A segment: empties its list and returns a tuple."""

    def call(arguments: list[Any]) -> Sequence[Any]:
        values = tuple(arguments)
        arguments.clear()
        result = function(*values)
        return result if isinstance(result, tuple) else (result,)

    return call


def no_store() -> Run:
    return Run(make_store("unused")[0], Measurement())


def test_a_step_of_two_parameters() -> None:
    """y = x @ a @ b with its gradients: parameters come, gradients go, nothing is left in a slot."""
    store, parameters = make_store("a", "b")
    x = torch.randn(WIDTH, WIDTH)
    build = Builder()
    given = build.graph.placeholder("x")
    build.fetch("param:0")
    (hidden,) = build.call("matmul", given, build.parameter("param:0", "a"))
    build.event("evict", "param:0")
    build.fetch("param:1")
    (result,) = build.call("matmul", hidden, build.parameter("param:1", "b"))
    (grad_hidden,) = build.call("grad_left", build.parameter("param:1", "b"))
    build.fetch("grad:1", "grad:0")
    build.event("evict", "param:1")
    (grad_b,) = build.call("grad_right", hidden)
    build.sink("b", "grad:1", grad_b)
    (grad_a,) = build.call("grad_chain", given, grad_hidden)
    build.sink("a", "grad:0", grad_a)
    build.put_back("grad:1")
    build.put_back("grad:0")
    build.graph.output((result, None, hidden))
    ones = torch.ones(WIDTH, WIDTH)
    segments = {
        "matmul": boxed(torch.matmul),
        "grad_left": boxed(lambda b: ones @ b.t()),
        "grad_right": boxed(lambda hidden: hidden.t() @ ones),
        "grad_chain": boxed(lambda x, grad: x.t() @ grad),
    }
    measurement = Measurement()
    outputs = lower(build.graph, segments)([x], Run(store, measurement))

    a, b = (nn.Parameter(p.detach().clone()) for p in parameters.values())
    expected_hidden = x @ a
    expected = expected_hidden @ b
    expected.sum().backward()
    assert torch.equal(outputs[0], expected)
    assert outputs[1] is None
    assert torch.equal(outputs[2], expected_hidden)
    assert torch.equal(parameters["a"].grad, a.grad)
    assert torch.equal(parameters["b"].grad, b.grad)
    assert store.present == frozenset()
    assert [name for name, _ in measurement.peaks] == [
        "call_matmul", "call_matmul", "call_grad_left", "call_grad_right", "call_grad_chain",
    ]  # fmt: skip


# ---------------------------------------------------------------- registers


def test_arguments_are_taken_over_and_the_caller_s_list_emptied() -> None:
    build = Builder()
    x, unused = build.graph.placeholder("x"), build.graph.placeholder("unused")
    assert not unused.users
    (y,) = build.call("double", x)
    build.graph.output((y,))
    arguments = [torch.ones(3), torch.ones(3)]
    alive = weakref.ref(arguments[1])

    def double(values: list[Any]) -> Sequence[Any]:
        assert alive() is None  # an input that nobody reads is not even kept
        return (2 * values.pop(),)

    (result,) = lower(build.graph, {"double": double})(arguments, no_store())
    assert arguments == []
    assert result.tolist() == [2.0] * 3


def chain(length: int, num_readers: int = 1) -> fx.Graph:
    """x -> f -> f ... -> out, each value read `num_readers` times by its one reader."""
    build = Builder()
    value = build.graph.placeholder("x")
    for _ in range(length):
        (value,) = build.call("f", *[value] * num_readers)
    build.graph.output((value,))
    return build.graph


@pytest.mark.parametrize("num_readers", [1, 2])
def test_the_last_reader_holds_the_only_reference(num_readers: int) -> None:
    """A segment can free an input while it runs: two values of 1 MiB are alive at once, never three."""
    cpu_allocator.install()

    def f(values: list[Tensor]) -> Sequence[Tensor]:
        alive = weakref.ref(values[0])
        result = torch.neg(values[0])
        values.clear()
        assert alive() is None
        scratch = torch.empty_like(result)  # fits where the input was
        return (scratch.copy_(result),)

    executable = lower(chain(3, num_readers), {"f": f})
    arguments = [torch.ones(MIB // 4)]
    run = no_store()
    base = cpu_allocator.current_nbytes() - MIB
    with cpu_allocator.hard_limit(base + 2 * MIB):
        (result,) = executable(arguments, run)
    assert result[0] == -1
    assert len(run.measurement.peaks) == 3
    for _, nbytes in run.measurement.peaks:
        assert nbytes == base + 2 * MIB


def test_a_value_stays_for_a_later_reader() -> None:
    """The limit of the test above is one byte short when an input has a second reader."""
    cpu_allocator.install()
    build = Builder()
    x = build.graph.placeholder("x")
    (y,) = build.call("f", x)
    (z,) = build.call("add", x, y)
    build.graph.output((z,))

    def f(values: list[Tensor]) -> Sequence[Tensor]:
        result = torch.neg(values[0])
        values.clear()
        return (torch.empty_like(result).copy_(result),)

    executable = lower(build.graph, {"f": f, "add": boxed(torch.add)})
    run = no_store()
    arguments = [torch.ones(MIB // 4)]
    limit = cpu_allocator.current_nbytes() + 2 * MIB
    with cpu_allocator.hard_limit(limit - 1), pytest.raises(torch.OutOfMemoryError):
        executable(arguments, run)
    arguments = [torch.ones(MIB // 4)]
    with cpu_allocator.hard_limit(limit):
        (result,) = executable(arguments, run)
    assert result[0] == 0


def test_an_output_is_kept_and_one_that_is_not_read_is_dropped() -> None:
    build = Builder()
    x = build.graph.placeholder("x")
    kept, dropped = build.call("split", x, num_outputs=2)
    assert not dropped.users
    (last,) = build.call("touch", kept)
    build.graph.output((kept, None, last, x))
    made = []

    def split(values: list[Tensor]) -> Sequence[Tensor]:
        (value,) = values
        values.clear()
        results = (value + 1, value + 2)
        made.append(weakref.ref(results[1]))
        return results

    def touch(values: list[Tensor]) -> Sequence[Tensor]:
        assert made[0]() is None
        return (values.pop() * 10,)

    given = torch.zeros(2)
    outputs = lower(build.graph, {"split": split, "touch": touch})([given], no_store())
    assert [None if o is None else o.tolist() for o in outputs] == [[1, 1], None, [10, 10], [0, 0]]
    assert outputs[3] is given


def test_gradients_are_off_while_it_runs() -> None:
    seen = []
    executable = lower(chain(1), {"f": boxed(lambda x: (seen.append(torch.is_grad_enabled()), x * 2)[1])})
    with torch.enable_grad():
        (result,) = executable([torch.ones(2, requires_grad=True)], no_store())
        assert torch.is_grad_enabled()
    assert seen == [False]
    assert not result.requires_grad


# ---------------------------------------------------------------- sinks


class Recorder:
    """Stands for a store: notes what the executor asks of it, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.tier = CpuTier()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, *args, *kwargs.values()))

        return call

    def names(self, *methods: str) -> list[tuple]:
        return [call for call in self.calls if call[0] in methods]


def test_instructions_come_in_the_order_of_the_graph() -> None:
    build = Builder()
    x = build.graph.placeholder("x")
    build.event("prefetch", "param:0", "grad:0")
    build.event("wait", "param:0")
    left, right = build.call("split", x, build.parameter("param:0", "a"), num_outputs=2)
    build.event("wait", "grad:0")
    build.sink("b", "grad:0", right)
    build.sink("a", "grad:0", left, owned=False)
    build.event("evict", "param:0")
    build.put_back("grad:0")
    build.graph.output(())
    store = Recorder()
    run = Run(store, Measurement())  # type: ignore[arg-type]
    assert lower(build.graph, {"split": boxed(lambda x, p: (x + 1, x + 2))})([torch.zeros(1)], run) == []
    events = ("prefetch", "wait", "evict", "write_back", "parameter_view", "begin_compute", "end_compute")
    assert store.names(*events) == [
        ("prefetch", "param:0"),
        ("prefetch", "grad:0"),
        ("wait", "param:0"),
        ("parameter_view", "param:0", "a"),
        ("begin_compute", "param:0"),
        ("end_compute", "param:0"),
        ("wait", "grad:0"),
        ("evict", "param:0"),
        ("write_back", "grad:0"),
        ("wait", "grad:0"),
        ("evict", "grad:0"),
    ]
    sinks = store.names("sink")
    assert [(name, chunk, float(take()), owned) for _, name, chunk, take, owned in sinks] == [
        ("b", "grad:0", 2.0, True),
        ("a", "grad:0", 1.0, False),
    ]


def test_a_gradient_is_owned_only_by_its_last_reader() -> None:
    """A gradient sunk twice, or also returned, may not become `.grad` itself."""
    build = Builder()
    x = build.graph.placeholder("x")
    twice, returned, once = build.call("three", x, num_outputs=3)
    build.sink("a", None, twice)
    build.sink("b", None, twice)
    build.sink("c", None, returned)
    build.sink("d", None, once)
    build.graph.output((returned,))
    store = Recorder()
    run = Run(store, Measurement())  # type: ignore[arg-type]
    lower(build.graph, {"three": boxed(lambda x: (x + 1, x + 2, x + 3))})([torch.zeros(1)], run)
    owned = {name: owned for _, name, _, _, owned in store.names("sink")}
    assert owned == {"a": False, "b": True, "c": False, "d": True}


def test_a_sunk_gradient_s_register_is_cleared_before_the_sink() -> None:
    """So a resident parameter's `.grad` is the gradient itself, and nothing else holds it."""
    build = Builder()
    x = build.graph.placeholder("x")
    (gradient,) = build.call("f", x)
    build.sink("a", None, gradient)
    (after,) = build.call("look", x)
    build.graph.output((after,))
    store, parameters = make_store("a")
    store.place(store.layout, {}, frozenset({0}))
    seen = []

    def look(values: list[Tensor]) -> Sequence[Tensor]:
        seen.append(weakref.ref(parameters["a"].grad))
        parameters["a"].grad = None
        assert seen[0]() is None
        return (values.pop(),)

    segments = {"f": boxed(lambda x: x.expand(WIDTH, WIDTH).clone()), "look": look}
    lower(build.graph, segments)([torch.ones(1)], Run(store, Measurement()))
    assert len(seen) == 1


def test_updates_are_called_with_their_range() -> None:
    graph = fx.Graph()
    graph.call_function(chunk_ops.update, (3, 0, 64))
    graph.call_function(chunk_ops.update, (1, 64, 100))
    graph.output(())
    seen: list[Tile] = []
    store, _ = make_store("a")
    run = Run(store, Measurement(), seen.append)
    assert lower(graph, {})([], run) == []
    assert seen == [Tile(3, 0, 64), Tile(1, 64, 100)]
    assert len(run.measurement.peaks) == 2


# ---------------------------------------------------------------- errors


def failing_graph() -> fx.Graph:
    """A parameter and a gradient chunk with a gradient in it are in slots when segment `fail` runs."""
    build = Builder()
    x = build.graph.placeholder("x")
    build.fetch("param:0", "grad:0", "param:1")
    (gradient,) = build.call("square", x)
    build.sink("a", "grad:0", gradient)
    build.event("prefetch", "grad:1")
    (y,) = build.call("fail", x, build.parameter("param:0", "a"))
    build.graph.output((y,))
    return build.graph


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("oops"), KeyboardInterrupt(), torch.OutOfMemoryError("no"), HomeError("disk")]
)
def test_an_error_gives_all_slots_back_and_is_raised_itself(error: BaseException) -> None:
    store, parameters = make_store("a", "b")
    alive = []

    def fail(values: list[Any]) -> Sequence[Any]:
        alive.append(weakref.ref(values[0]))
        raise error

    segments = {"square": boxed(lambda x: x.expand(WIDTH, WIDTH).clone()), "fail": fail}
    executable = lower(failing_graph(), segments)
    with pytest.raises(type(error)) as caught:
        executable([torch.full((1,), 9.0)], Run(store, Measurement()))
    assert caught.value is error
    assert store.present == frozenset()
    assert parameters["a"].tolist() == [[1.0] * WIDTH] * WIDTH
    assert parameters["a"].grad.tolist() == [[9.0] * WIDTH] * WIDTH  # sunk before the error: brought home
    error.__traceback__ = None
    del caught
    assert alive[0]() is None  # no register holds values of the step that failed
    store.prefetch("param:0")  # and the store works
    store.wait("param:0")
    assert store.parameter_view("param:0", "a")[0, 0] == 1


def test_a_second_error_while_slots_are_given_back_is_a_note() -> None:
    """The gradient cannot be written home either: `.grad` is None, the first error is what is raised."""
    store, parameters = make_store("a", "b")

    def fail(values: list[Any]) -> Sequence[Any]:
        def no_space(*args: object) -> None:
            raise HomeError("the disk is on fire")

        store.arena.home.write = no_space  # type: ignore[method-assign]
        raise ZeroDivisionError("oops")

    segments = {"square": boxed(lambda x: x.expand(WIDTH, WIDTH).clone()), "fail": fail}
    with pytest.raises(ZeroDivisionError, match="oops") as caught:
        lower(failing_graph(), segments)([torch.ones(1)], Run(store, Measurement()))
    assert any("on fire" in note for note in caught.value.__notes__)
    assert store.present == frozenset()
    assert parameters["a"].grad is None
    assert parameters["a"].tolist() == [[1.0] * WIDTH] * WIDTH


def test_out_of_memory_for_a_slot_is_raised_itself() -> None:
    """The chunk that got no slot does not stop the others from being given back."""
    cpu_allocator.install()
    store, _ = make_store("a", "b")
    build = Builder()
    build.fetch("param:0")
    build.event("prefetch", "param:1")
    build.graph.output(())
    executable = lower(build.graph, {})
    with (
        cpu_allocator.hard_limit(cpu_allocator.current_nbytes() + 64 * 4),
        pytest.raises(torch.OutOfMemoryError),
    ):
        executable([], Run(store, Measurement()))
    assert store.present == frozenset()
    assert executable([], Run(store, Measurement())) == []


@pytest.mark.parametrize("missing", ["prefetch", "wait"])
def test_a_missing_event_is_an_illegal_state(missing: str) -> None:
    store, _ = make_store("a")
    build = Builder()
    for kind in ("prefetch", "wait"):
        if kind != missing:
            build.event(kind, "param:0")
    (y,) = build.call("f", build.parameter("param:0", "a"))
    build.graph.output((y,))
    with pytest.raises(ChunkStateError, match="param:0"):
        lower(build.graph, {"f": boxed(torch.neg)})([], Run(store, Measurement()))
    assert store.present == frozenset()


# ---------------------------------------------------------------- measurement


def test_each_moment_is_measured_apart_from_what_lies_between() -> None:
    """Bytes per call: its own peak, scratch included; a slot taken between calls is seen apart."""
    cpu_allocator.install()
    store, _ = make_store("a")
    build = Builder()
    x = build.graph.placeholder("x")
    (y,) = build.call("scratch", x)
    build.fetch("param:0")
    build.event("evict", "param:0")
    (z,) = build.call("small", y)
    build.graph.output((z,))

    def scratch(x: Tensor) -> Tensor:
        torch.empty(MIB, dtype=torch.uint8)
        return torch.zeros(16)

    segments = {"scratch": boxed(scratch), "small": boxed(lambda y: y + 1)}
    executable: Executable = lower(build.graph, segments)
    arguments = [torch.zeros(16)]
    measurement = Measurement()
    base = store.tier.measured_nbytes()
    store.tier.lap_peak_nbytes()
    executable(arguments, Run(store, measurement))
    peaks = dict(measurement.peaks)
    assert peaks["call_scratch"] == base + MIB
    assert base < peaks["call_small"] < base + 4096
    assert base + 64 * 4 <= measurement.between_nbytes < base + 4096
    assert measurement.compute_s > 0
