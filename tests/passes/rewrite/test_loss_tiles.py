"""Losses in tiles of rows, on Dynamo's graphs: the same loss and gradients, and what is not tiled says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.functional import cross_entropy, linear, log_softmax, nll_loss

from chunkc.passes.graphs.graphs import tile_of
from chunkc.passes.rewrite.loss_tiles import Losses, tile_losses

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, LENGTH, WIDTH, CLASSES, ROWS = 2, 9, 8, 23, 4
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def plain(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(linear(x, w).flatten(0, 1), y.flatten())


def with_bias_in_fp32(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(linear(x, w, b).float().view(-1, CLASSES), y.view(-1))


def shifted(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = linear(x, w)[..., :-1, :].contiguous()
    return cross_entropy(logits.view(-1, CLASSES), y[..., 1:].reshape(-1), ignore_index=3)


def shifted_before_the_last(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(linear(x, w)[:, :-1].reshape(-1, CLASSES).float(), y[:, 1:].reshape(-1), label_smoothing=0.1)


def of_rows_that_are_not_contiguous(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(linear(x.transpose(0, 1), w).view(-1, CLASSES), y.t().reshape(-1), reduction="sum")


def capped(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = torch.tanh(linear(x, w) / 3.0) * 3.0
    return cross_entropy((2 * logits).flatten(0, 1), y.flatten(), reduction="sum") / 7


def by_row(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(linear(x, w).flatten(0, 1), y.flatten(), reduction="none").view(y.shape).square().sum()


def with_logits_returned(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = linear(x, w)
    return cross_entropy(logits.float().view(-1, CLASSES), y.view(-1)), logits


def with_logits_in_the_loss(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    logits = linear(x, w)
    return cross_entropy(logits.flatten(0, 1), y.flatten()) + 0.1 * logits.square().mean()


def of_two_dimensions(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(linear(x.flatten(0, 1), w, b), y.flatten())


def of_a_product(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return cross_entropy((x @ w.t()).flatten(0, 1), y.flatten())


def after_autocast(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = linear(x, w)
    return cross_entropy(logits.flatten(0, 1), y.flatten())


def under_autocast(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(linear(x, w).flatten(0, 1), y.flatten())


def twice(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return plain(x, w, b, y) + plain(2 * x, w, b, y)


FUSED = [
    plain, with_bias_in_fp32, shifted, shifted_before_the_last, of_rows_that_are_not_contiguous, capped, by_row,
    of_two_dimensions, under_autocast, twice,
]  # fmt: skip
"""Whose logits are not there as a whole."""

READ = [with_logits_returned, with_logits_in_the_loss]
"""Whose logits are, since somebody else reads them."""

BEHIND = [of_a_product, after_autocast]
"""Whose logits are, since it is not known how to make them by rows."""


def inputs(dtype: torch.dtype = torch.float32, batch: int = BATCH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, LENGTH, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    made = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return [*made, torch.randint(CLASSES, (batch, LENGTH), generator=generator)]


class Tiler:
    """A backend that runs Dynamo's graph with its losses tiled."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows, self.graphs, self.losses = rows, [], []  # type: ignore[var-annotated]

    def __call__(self, gm: fx.GraphModule, _: Any) -> Any:
        self.losses.append(tile_losses(gm.graph, self.rows))
        gm.graph.lint()
        gm.recompile()
        self.graphs.append(gm.graph)
        return gm.forward


def run(loss: Callable[..., Any], arguments: list[Tensor]) -> list[Tensor]:
    """The outputs and the gradients of the first."""
    found = loss(*arguments)
    outputs = list(found) if isinstance(found, tuple) else [found]
    outputs[0].backward()
    gradients = [a.grad for a in arguments if a.grad is not None]
    for argument in arguments:
        argument.grad = None
    return [*(output.detach() for output in outputs), *gradients]


def assert_close(found: list[Tensor], expected: list[Tensor], in_bfloat16: bool = False) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one.dtype == other.dtype
        tolerance = 1e-5 if other.dtype == torch.float32 and not in_bfloat16 else 2e-2
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def tiles_in(graph: fx.Graph) -> set[object]:
    return {tile_of(node) for node in graph.nodes} - {None}


@pytest.mark.parametrize("loss", [*FUSED, *READ, *BEHIND], ids=lambda loss: loss.__name__)
def test_loss_and_gradients_are_those_of_the_whole(loss: Loss) -> None:
    """And there are no logits of all rows but where somebody reads them."""
    tiler = Tiler()
    expected, in_bfloat16 = run(loss, inputs()), loss in (under_autocast, after_autocast)
    assert_close(run(torch.compile(loss, backend=tiler), inputs()), expected, in_bfloat16)
    (losses,) = tiler.losses
    assert losses.tiled
    assert not losses.whole
    (graph,) = tiler.graphs
    assert len(tiles_in(graph)) >= 4
    made = [node for node in graph.nodes if "linear" in str(node.target) or "matmul" in str(node.target)]
    assert sum(tile_of(node) is None for node in made) == (loss not in FUSED)
    assert (len(made) >= 4) == (loss not in BEHIND)
    cross_entropies = graph.find_nodes(op="call_function", target=cross_entropy)
    assert all(tile_of(node) is not None and node.meta["recompute"] for node in cross_entropies)


@pytest.mark.parametrize(
    "loss", [plain, with_bias_in_fp32, with_logits_returned, by_row], ids=lambda loss: loss.__name__
)
def test_in_sixteen_bits(loss: Loss) -> None:
    assert_close(run(torch.compile(loss, backend=Tiler()), inputs(torch.bfloat16)), run(loss, inputs(torch.bfloat16)))


def test_few_rows_stay_as_they_are() -> None:
    tiler = Tiler(rows=BATCH * LENGTH)
    run(torch.compile(plain, backend=tiler), inputs())
    assert tiler.losses == [Losses()]
    assert not tiles_in(tiler.graphs[0])


def test_a_graph_that_is_tiled_stays_as_it_is() -> None:
    tiler = Tiler()
    run(torch.compile(plain, backend=tiler), inputs())
    before = str(tiler.graphs[0])
    assert tile_losses(tiler.graphs[0], 2) == Losses()
    assert str(tiler.graphs[0]) == before


def test_every_target_ignored_is_nan_as_in_the_whole() -> None:
    *tensors, _ = inputs()
    arguments = [*tensors, torch.full((BATCH, LENGTH), -100)]
    found, *gradients = run(torch.compile(plain, backend=Tiler()), arguments)
    assert found.isnan()
    expected, *others = run(plain, arguments)
    assert expected.isnan()
    for one, other in zip(gradients, others):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda x, w, b, y: cross_entropy(linear(x, w).flatten(0, 1), y.flatten(), weight=b.detach().abs()), "weights"),
        (lambda x, w, b, y: cross_entropy(x.flatten(0, 1), x.detach().flatten(0, 1).softmax(-1)), "class indices"),
        (lambda x, w, b, y: cross_entropy(x.flatten(0, 1), y.flatten() % 8, reduce=True), "reduction"),
    ],
    ids=["weights", "probabilities", "deprecated"],
)
def test_what_stays_whole_says_why(loss: Loss, reason: str) -> None:
    tiler = Tiler()
    assert_close(run(torch.compile(loss, backend=tiler), inputs()), run(loss, inputs()))
    (losses,) = tiler.losses
    (found,) = losses.whole
    assert reason in found
    assert not losses.tiled
    assert not tiles_in(tiler.graphs[0])


def test_losses_that_are_no_cross_entropy_are_left_alone() -> None:
    def loss(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
        return nll_loss(log_softmax(linear(x, w).flatten(0, 1), -1), y.flatten())

    tiler = Tiler()
    assert_close(run(torch.compile(loss, backend=tiler), inputs()), run(loss, inputs()))
    assert not tiles_in(tiler.graphs[0])


def test_sizes_that_change_take_one_graph() -> None:
    for loss in (plain, shifted, with_logits_returned):
        torch._dynamo.reset()
        tiler = Tiler()
        compiled = torch.compile(loss, backend=tiler, dynamic=True)
        for batch in (5, 3, 8):
            assert_close(run(compiled, inputs(batch=batch)), run(loss, inputs(batch=batch)))
        assert len(tiler.graphs) == 1
        assert len(tiles_in(tiler.graphs[0])) >= 10


def test_marks_reach_the_tiles_of_the_backward() -> None:
    """By AOTAutograd and the partitioner, which copies what is computed again."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm.graph)
        return gm.forward

    def backend(gm: fx.GraphModule, arguments: Any) -> Any:
        Tiler()(gm, arguments)
        made = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
        return made(gm, arguments)

    assert_close(run(torch.compile(plain, backend=backend), inputs()), run(plain, inputs()))
    forward, backward = graphs
    assert len(tiles_in(forward)) == len(tiles_in(backward)) == 5
    largest = max(node.meta["val"].numel() for graph in graphs for node in graph.nodes if is_computed(node))
    assert largest < BATCH * LENGTH * CLASSES


def is_computed(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
