"""Collectives in a model: in one order, each by itself with its wait, never repeated, and their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc.ir.hardware import CPU
from chunkc.ir.links import BETWEEN_DEVICES, LinkSpec, host_links
from chunkc.machines.presets import load_hardware
from chunkc.passes.graphs.collectives import WAIT, Rendezvous, exchange_of, wait_at_once, without_group_names
from chunkc.passes.graphs.cost import cost_s
from chunkc.passes.graphs.graphs import is_compute, returned
from chunkc.passes.memory.scratch.cpu import scratch_nbytes
from chunkc.passes.memory.segment_memory import eager_memory
from chunkc.passes.planning.recompute import may_recompute
from chunkc.passes.segments.cuts import cut
from chunkc.passes.segments.segments import SegmentTable, extract
from chunkc.runtime.device import cpu_allocator

ops = torch.ops._c10d_functional


@pytest.fixture
def group() -> Iterator[str]:
    """This process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def two_sums() -> fx.GraphModule:
    """As DTensor leaves them: waits come where results are read."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
        first = ops.all_reduce(torch.mm(x, y), "sum", "7")
        second = ops.all_reduce(torch.relu(y), "sum", "3")
        return (torch.relu(ops.wait_tensor(second)) + ops.wait_tensor(first),)

    return make_fx(function, tracing_mode="fake")(torch.randn(4, 4), torch.randn(4, 4))


def names(nodes: list[fx.Node]) -> list[str]:
    return [node.target.overloadpacket._qualified_op_name.partition("::")[2] for node in nodes]  # type: ignore[union-attr]


MACHINE = replace(
    load_hardware("4xh100"), links=(*host_links(1e9, 1e9), LinkSpec(BETWEEN_DEVICES, 100.0, 0.25)), devices_per_layer=4
)


@pytest.mark.parametrize(
    ("kind", "sends", "seconds"),
    [
        ("all_reduce", 2 * 48, 2 * (0.48 + 3 * 0.25)),
        ("all_gather_into_tensor", 4 * 48, 4 * 0.48 + 3 * 0.25),
        ("reduce_scatter_tensor", 48, 0.48 + 3 * 0.25),
        ("all_to_all_single", 48, 0.48 + 3 * 0.25),
        ("wait_tensor", None, 0.0),
        ("relu", None, 0.0),
    ],
)
def test_what_ranks_of_a_layer_exchange_takes_their_link(kind: str, sends: int | None, seconds: float) -> None:
    """Of 64 bytes, in a ring of four at 100 bytes a second."""
    more: dict[str, tuple[Any, ...]] = {
        "all_reduce": ("sum", "7"),
        "all_gather_into_tensor": (4, "7"),
        "reduce_scatter_tensor": ("sum", 4, "7"),
        "all_to_all_single": ([4] * 4, [4] * 4, "7"),
    }
    run = getattr(torch, kind) if kind == "relu" else getattr(ops, kind)
    gm = make_fx(lambda x: run(x, *more.get(kind, ())), tracing_mode="fake")(torch.randn(16))
    (node,) = (node for node in gm.graph.nodes if is_compute(node))
    exchange = exchange_of(node, MACHINE)
    assert (None if exchange is None else exchange.sent_nbytes(4)) == sends
    alone = replace(MACHINE, devices_per_layer=1)
    assert cost_s([node], MACHINE) - cost_s([node], alone) == pytest.approx(seconds)


def test_gloo_adds_up_on_every_rank_what_it_scatters() -> None:
    gm = make_fx(lambda x: ops.reduce_scatter_tensor(x, "sum", 4, "7"), tracing_mode="fake")(torch.randn(16))
    (node,) = (node for node in gm.graph.nodes if is_compute(node))
    exchange = exchange_of(node, CPU.used_by(4, None, 1, 4))
    assert exchange is not None
    assert exchange.sent_nbytes(4) == 2 * 48


@pytest.mark.parametrize("whole", [False, True])
def test_each_is_a_segment_with_its_wait_in_the_order_of_the_graph(whole: bool) -> None:
    gm = two_sums()
    wait_at_once(gm.graph)
    gm.graph.lint()
    runs = cut(gm.graph, groups={}, gradient_groups={}, whole=whole)
    pair = ["all_reduce", "wait_tensor"]
    assert [names(run) for run in runs] == [["mm"], pair, ["relu"], pair, ["relu", "add"]]
    pieces = extract(gm, runs, SegmentTable())
    assert [piece.segment.run_by_aten for piece in pieces] == [False, True, False, True, False]
    assert [may_recompute(piece.segment.module.graph) for piece in pieces] == [True, False, True, False, True]


def test_a_result_is_one_storage_before_and_behind_the_wait() -> None:
    gm = two_sums()
    wait_at_once(gm.graph)
    steps = eager_memory(gm.graph, 1).steps
    assert [step.nbytes for step in steps] == [64, 128, 64, 128, 192, 128, 192, 192]
    assert all(step.estimate is None for step in steps)
    assert [node for node in gm.graph.nodes if is_compute(node)][-1] is returned(gm.graph)[0]


def test_groups_have_other_names_on_ranks_that_do_the_same() -> None:
    first = two_sums().code
    second = first.replace("'7'", "'12'").replace("'3'", "'7'")
    one_group = first.replace("'3'", "'7'")
    assert first != second
    assert without_group_names(first) == without_group_names(second)
    assert without_group_names(first) != without_group_names(one_group)
    assert without_group_names("relu = torch.ops.aten.relu('7')") == "relu = torch.ops.aten.relu('7')"


@pytest.mark.parametrize(
    ("target", "more"),
    [
        (ops.all_reduce.default, ("sum",)),
        (ops.broadcast.default, (0,)),
        (ops.all_gather_into_tensor.default, (1,)),
        (ops.reduce_scatter_tensor.default, ("sum", 1)),
        (ops.all_to_all_single.default, ([120], [120])),
    ],
)
def test_a_collective_takes_what_is_predicted_and_holds_nothing(
    target: torch._ops.OpOverload, more: tuple[object, ...], group: str
) -> None:
    cpu_allocator.install()
    given = torch.randn(120, 50)
    for _ in range(400):  # gloo's thread, which lets go late, is met in one of some hundred
        before = cpu_allocator.current_nbytes()
        cpu_allocator.reset_peak()
        result = Rendezvous(target)(given, *more, group)
        assert cpu_allocator.current_nbytes() == before + result.nbytes
        taken = cpu_allocator.peak_nbytes() - before - result.nbytes
        assert taken == scratch_nbytes(target, (given, *more, group), {}, result, 1)
        assert torch.equal(WAIT(result), given)
        del result
        assert cpu_allocator.current_nbytes() == before
