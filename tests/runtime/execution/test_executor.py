"""The executor: registers and the last reference to a value; sinks, updates, errors and measurements, in order."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from late_tiers import LateEvent, LateStream
from store_cases import MIB, WIDTH, Builder, boxed, make_store, raiser
from torch import Tensor, fx

from chunkc.ir.errors import HomeError
from chunkc.ir.layout import Chunk
from chunkc.runtime.device import cpu_allocator
from chunkc.runtime.device.tier import CpuTier, Links
from chunkc.runtime.execution import executor
from chunkc.runtime.execution.executor import Executable, lower
from chunkc.runtime.execution.run import Measurement, Run
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.homes import open_home
from chunkc.runtime.store.slots import Traffic

pytestmark = pytest.mark.timeout(30)


def no_store() -> Run:
    return Run(make_store("unused")[0], Measurement())


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


class Recorder:
    """Stands for a store and its parts: notes what the executor asks of them, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.tier, self.traffic, self.arena = CpuTier(), Traffic(), Arena(open_home("cpu"))
        self.slots = self.views = self.gradients = self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append((name, *args, *kwargs.values()))

        return call

    def names(self, *methods: str) -> list[tuple]:
        return [call for call in self.calls if call[0] in methods]


def test_instructions_come_in_the_order_of_the_graph() -> None:
    build = Builder()
    x = build.graph.placeholder("x")
    build.event("prefetch", Chunk("param", 0), Chunk("grad", 0))
    build.event("wait", Chunk("param", 0))
    left, right = build.call("split", x, build.parameter(Chunk("param", 0), "a"), num_outputs=2)
    build.event("wait", Chunk("grad", 0))
    build.sink("b", Chunk("grad", 0), right)
    build.sink("a", Chunk("grad", 0), left, owned=False)
    build.event("evict", Chunk("param", 0))
    build.put_back(Chunk("grad", 0))
    build.graph.output(())
    store = Recorder()
    run = Run(store, Measurement())  # type: ignore[arg-type]
    assert lower(build.graph, {"split": boxed(lambda x, p: (x + 1, x + 2))})([torch.zeros(1)], run) == []
    events = ("prefetch", "wait", "evict", "write_back", "slot_view", "begin_compute", "end_compute")
    assert store.names(*events) == [
        ("prefetch", Chunk("param", 0), "to_device"),
        ("prefetch", Chunk("grad", 0), "to_device"),
        ("wait", Chunk("param", 0)),
        ("slot_view", Chunk("param", 0), "a"),
        ("begin_compute", Chunk("param", 0)),
        ("end_compute", Chunk("param", 0)),
        ("wait", Chunk("grad", 0)),
        ("evict", Chunk("param", 0)),
        ("write_back", Chunk("grad", 0), "to_home"),
        ("wait", Chunk("grad", 0)),
        ("evict", Chunk("grad", 0)),
    ]
    sinks = store.names("sink")
    assert [(name, chunk, float(take()), owned) for _, name, chunk, take, owned in sinks] == [
        ("b", Chunk("grad", 0), 2.0, True),
        ("a", Chunk("grad", 0), 1.0, False),
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


def failing_graph() -> fx.Graph:
    """A parameter and a gradient chunk with a gradient in it are in slots when segment `fail` runs."""
    build = Builder()
    x = build.graph.placeholder("x")
    build.fetch(Chunk("param", 0), Chunk("grad", 0), Chunk("param", 1))
    (gradient,) = build.call("square", x)
    build.sink("a", Chunk("grad", 0), gradient)
    build.event("prefetch", Chunk("grad", 1))
    (y,) = build.call("fail", x, build.parameter(Chunk("param", 0), "a"))
    build.graph.output((y,))
    return build.graph


class NotingLink(LateStream):
    """Notes the calls between an instruction and each copy that it queues."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str]] = []

    def submit(self, job: Callable[[], None], *, after: Iterable[LateEvent] = ()) -> LateEvent:
        calls, frame = [], sys._getframe()
        while not isinstance(frame.f_locals.get("self"), executor._Prefetch | executor._WriteBack):
            calls.append(frame.f_code.co_name)
            assert frame.f_back is not None
            frame = frame.f_back
        self.calls.append(calls)
        return super().submit(job, after=after)


def test_a_copy_is_queued_within_four_calls() -> None:
    store, _ = make_store("a")
    link = NotingLink()
    store.tier.links = Links(lambda name: link)
    build = Builder()
    gradient = build.graph.placeholder("gradient")
    build.fetch(Chunk("param", 0), Chunk("grad", 0))
    build.sink("a", Chunk("grad", 0), gradient)
    build.put_back(Chunk("grad", 0))
    build.event("evict", Chunk("param", 0))
    build.graph.output(())
    lower(build.graph, {})([torch.ones(WIDTH, WIDTH)], Run(store, Measurement()))
    assert link.calls == [["submit", "prefetch", "prefetch"], ["submit", "write_back", "write_back"]]


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
    assert store.slots.present == frozenset()
    assert parameters["a"].tolist() == [[1.0] * WIDTH] * WIDTH
    assert parameters["a"].grad.tolist() == [[9.0] * WIDTH] * WIDTH  # sunk before the error: brought home
    error.__traceback__ = None
    del caught
    assert alive[0]() is None  # no register holds values of the step that failed
    store.prefetch(Chunk("param", 0))  # and the store works
    store.slots.wait(Chunk("param", 0))
    assert store.views.slot_view(Chunk("param", 0), "a")[0, 0] == 1


def test_a_second_error_while_slots_are_given_back_is_a_note() -> None:
    """The gradient cannot be written home either: `.grad` is None, the first error is what is raised."""
    store, parameters = make_store("a", "b")

    def fail(values: list[Any]) -> Sequence[Any]:
        store.arena.home.write = raiser(HomeError("the disk is on fire"))  # type: ignore[method-assign]
        raise ZeroDivisionError("oops")

    segments = {"square": boxed(lambda x: x.expand(WIDTH, WIDTH).clone()), "fail": fail}
    with pytest.raises(ZeroDivisionError, match="oops") as caught:
        lower(failing_graph(), segments)([torch.ones(1)], Run(store, Measurement()))
    assert any("on fire" in note for note in caught.value.__notes__)
    assert store.slots.present == frozenset()
    assert parameters["a"].grad is None
    assert parameters["a"].tolist() == [[1.0] * WIDTH] * WIDTH


class MarkedTier(CpuTier):
    """Counts marks; `problem` is raised instead, as by a device that is broken."""

    num_marks, problem = 0, None

    def mark(self) -> tuple[()]:
        self.num_marks += 1
        if self.problem is not None:
            raise self.problem
        return ()


@pytest.mark.parametrize("problem", [None, RuntimeError("the device is broken")])
def test_the_phase_after_one_that_failed_comes_behind_it(problem: Exception | None) -> None:
    """Where it runs on another stream, it waits for the last mark: what failed had enqueued work before that."""
    store = Recorder()
    store.tier = tier = MarkedTier()

    def fail(values: list[Any]) -> Sequence[Any]:
        tier.num_marks, tier.problem = 0, problem
        raise ZeroDivisionError("oops")

    segments = {"square": boxed(lambda x: x.expand(WIDTH, WIDTH).clone()), "fail": fail}
    with pytest.raises(ZeroDivisionError, match="oops") as caught:
        lower(failing_graph(), segments)([torch.ones(1)], Run(store, Measurement()))  # type: ignore[arg-type]
    assert tier.num_marks == 1
    notes = getattr(caught.value, "__notes__", [])
    assert any("broken" in note for note in notes) == (problem is not None)


def test_out_of_memory_for_a_slot_is_raised_itself() -> None:
    """The chunk that got no slot does not stop the others from being given back."""
    cpu_allocator.install()
    store, _ = make_store("a", "b")
    build = Builder()
    build.fetch(Chunk("param", 0))
    build.event("prefetch", Chunk("param", 1))
    build.graph.output(())
    executable = lower(build.graph, {})
    with (
        cpu_allocator.hard_limit(cpu_allocator.current_nbytes() + 64 * 4),
        pytest.raises(torch.OutOfMemoryError),
    ):
        executable([], Run(store, Measurement()))
    assert store.slots.present == frozenset()
    assert executable([], Run(store, Measurement())) == []


def test_each_moment_is_measured_apart_from_what_lies_between() -> None:
    """Bytes per call: its own peak, scratch included; a slot taken between calls is seen apart."""
    cpu_allocator.install()
    store, _ = make_store("a")
    build = Builder()
    x = build.graph.placeholder("x")
    (y,) = build.call("scratch", x)
    build.fetch(Chunk("param", 0))
    build.event("evict", Chunk("param", 0))
    (z,) = build.call("small", y)
    build.graph.output((z,))

    def scratch(x: Tensor) -> Tensor:
        torch.empty(MIB, dtype=torch.uint8)
        return torch.zeros(16)

    segments = {"scratch": boxed(scratch), "small": boxed(lambda y: y + 1)}
    executable: Executable = lower(build.graph, segments)
    arguments = [torch.zeros(16)]
    measurement = Measurement()
    base = cpu_allocator.current_nbytes()
    store.tier.lap_peak_nbytes()
    executable(arguments, Run(store, measurement))
    peaks = dict(measurement.peaks)
    assert peaks["call_scratch"] == base + MIB
    assert base < peaks["call_small"] < base + 4096
    assert base + 64 * 4 <= measurement.between_nbytes < base + 4096
    assert measurement.compute_s > 0
