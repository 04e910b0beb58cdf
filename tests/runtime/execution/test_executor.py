"""The executor: registers, and who holds the last reference to a value."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from executor_cases import MIB, WIDTH, Builder, boxed, make_store
from torch import Tensor, fx, nn

from chunkc.ir.layout import Chunk
from chunkc.runtime.device import cpu_allocator
from chunkc.runtime.execution.executor import lower
from chunkc.runtime.execution.run import Measurement, Run

pytestmark = pytest.mark.timeout(30)


def no_store() -> Run:
    return Run(make_store("unused")[0], Measurement())


def test_a_step_of_two_parameters() -> None:
    """y = x @ a @ b with its gradients: parameters come, gradients go, nothing is left in a slot."""
    store, parameters = make_store("a", "b")
    x = torch.randn(WIDTH, WIDTH)
    build = Builder()
    given = build.graph.placeholder("x")
    build.fetch(Chunk("param", 0))
    (hidden,) = build.call("matmul", given, build.parameter(Chunk("param", 0), "a"))
    build.event("evict", Chunk("param", 0))
    build.fetch(Chunk("param", 1))
    (result,) = build.call("matmul", hidden, build.parameter(Chunk("param", 1), "b"))
    (grad_hidden,) = build.call("grad_left", build.parameter(Chunk("param", 1), "b"))
    build.fetch(Chunk("grad", 1), Chunk("grad", 0))
    build.event("evict", Chunk("param", 1))
    (grad_b,) = build.call("grad_right", hidden)
    build.sink("b", Chunk("grad", 1), grad_b)
    (grad_a,) = build.call("grad_chain", given, grad_hidden)
    build.sink("a", Chunk("grad", 0), grad_a)
    build.put_back(Chunk("grad", 1))
    build.put_back(Chunk("grad", 0))
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
    assert store.slots.present == frozenset()
    assert [name for name, _ in measurement.peaks] == [
        "call_matmul", "call_matmul", "call_grad_left", "call_grad_right", "call_grad_chain",
    ]  # fmt: skip


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
