"""The table against the allocator: real operators, real tensors, scratch measured to the byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from chunkc.passes import scratch
from chunkc.runtime import cpu_allocator

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
THREADS = (1, 2, 3)


@pytest.fixture(autouse=True)
def _meter() -> Iterator[None]:
    cpu_allocator.install()
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def measure(target, args: tuple, kwargs: dict) -> tuple[int, object]:
    """Bytes at the operator's peak beyond its inputs and outputs, and its outputs."""
    before = cpu_allocator.current_nbytes()
    cpu_allocator.reset_peak()
    outputs = target(*args, **kwargs)
    return cpu_allocator.peak_nbytes() - max(cpu_allocator.current_nbytes(), before), outputs


def check(target, *args, exact: bool = False, threads: tuple[int, ...] = THREADS, **kwargs) -> None:
    """Measured <= table for every number of threads; equal where said to be exact."""
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        measured, outputs = measure(target, args, kwargs)
        predicted = scratch.scratch_nbytes(target, args, kwargs, outputs, num_threads)
        say = f"{target} with {num_threads} threads: measured {measured}, table {predicted}"
        assert scratch.is_known(target), say
        assert measured == predicted if exact else measured <= predicted, say


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """A matrix that is contiguous, transposed, strided inside, a slice of rows, or expanded."""
    if layout == "transposed":
        return torch.randn(columns, rows).to(dtype).t()
    if layout == "strided":
        return torch.randn(rows, 2 * columns).to(dtype)[:, ::2]
    if layout == "rows":
        return torch.randn(2 * rows, columns).to(dtype)[::2]
    if layout == "expanded":
        return torch.randn(columns).to(dtype).expand(rows, columns)
    return torch.randn(rows, columns).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "expanded"])
@pytest.mark.parametrize("size", [(5, 7), (200, 300)])
def test_rows(size: tuple[int, int], layout: str, dtype: torch.dtype) -> None:
    """Reductions, scans, sorts, softmaxes and copies of matrices, over either dimension."""
    x, grad = matrix(*size, dtype, layout), matrix(*size, dtype, "contiguous")
    full = dtype == torch.float32
    for dim in (0, 1):
        for target in (
            aten.sum.dim_IntList,
            aten.mean.dim,
            aten.var.correction,
            aten.var_mean.correction,
            aten.amax.default,
        ):
            check(target, x, [dim])
        check(aten.sum.dim_IntList, x, [dim], dtype=torch.float32)
        check(aten.logsumexp.default, x, [dim])
        for target in (aten.argmax.default, aten.max.dim, aten.any.dim, aten.cumprod.default):
            check(target, x, dim)
        check(aten.cumsum.default, x, dim, exact=True)
        check(aten.cumsum.default, x, dim, dtype=torch.float64, exact=True)
        check(aten.sort.default, x, dim, exact=full)
        check(aten.sort.stable, x, stable=True, dim=dim)
        check(aten.topk.default, x, 3, dim)
        check(aten.cat.default, [x, x], dim, exact=True)
        check(aten.flip.default, x, [dim])
        check(aten.roll.default, x, [1], [dim])
        contiguous = layout == "contiguous"
        check(aten._safe_softmax.default, x, dim, exact=contiguous)
        for forward, backward in (
            (aten._softmax.default, aten._softmax_backward_data.default),
            (aten._log_softmax.default, aten._log_softmax_backward_data.default),
        ):
            check(forward, x, dim, False, exact=contiguous and full)
            check(backward, x, forward(grad, dim, False), dim, dtype, exact=contiguous and full)
    for target in (
        aten.sum.default,
        aten.mean.default,
        aten.prod.default,
        aten.max.default,
        aten.any.default,
    ):
        check(target, x)
    check(aten.linalg_vector_norm.default, x)
    check(aten.tril.default, x)
    check(aten.repeat.default, x, [2, 1])
    check(aten.clone.default, x, memory_format=torch.contiguous_format, exact=True)
    check(aten._to_copy.default, x, dtype=torch.float64, exact=True)
    check(aten.constant_pad_nd.default, x, [1, 1], 0.0)


def test_reductions_of_masks_and_integers() -> None:
    mask, integers = torch.rand(64, 50) > 0.5, torch.randint(9, (64, 50))
    for source in (mask, integers):
        for target in (aten.sum.default, aten.any.default, aten.all.default):
            check(target, source)
        check(aten.sum.dim_IntList, source, [0])
        check(aten.cumsum.default, source, 1, exact=True)
    check(aten.cumsum.default, integers, 1, dtype=torch.int32, exact=True)
    check(aten.sort.default, torch.randint(99, (40000,)), exact=True)
    check(aten.histc.default, torch.rand(1000), 16, 0.0, 1.0)


@pytest.mark.parametrize("left", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("right", [torch.float32, torch.bfloat16, torch.int32, torch.float64])
def test_casts_of_elementwise_operands(left: torch.dtype, right: torch.dtype) -> None:
    for other in ((6, 7), (7,), (6, 1), ()):
        a, b = torch.ones(3, 6, 7).to(left), torch.ones(other).to(right)
        common = torch.result_type(a, b)
        for target in (aten.add.Tensor, aten.mul.Tensor, aten.eq.Tensor, aten.maximum.default):
            check(target, a, b, exact=True, threads=(1,))
        check(aten.div.Tensor, a, b, threads=(1,))
        check(aten.where.self, torch.ones(7, dtype=torch.bool), a, b, threads=(1,))
        if torch.can_cast(common, left) and left != torch.bool:
            check(aten.add_.Tensor, a, b, threads=(1,))
    for number in (2, 0.5, True):
        for target in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.eq.Scalar, aten.mul.Scalar):
            check(target, torch.ones(3, 6, 7).to(right), number, threads=(1,))


@pytest.mark.parametrize("dtype", FLOATS)
def test_normalisations(dtype: torch.dtype) -> None:
    full = dtype == torch.float32
    for rows, columns in ((32, 16), (520, 96)):
        x, grad = torch.randn(rows, columns).to(dtype), torch.randn(rows, columns).to(dtype)
        weight, bias = torch.ones(columns).to(dtype), torch.zeros(columns).to(dtype)
        _, mean, rstd = aten.native_layer_norm.default(x, [columns], weight, bias, 1e-5)
        for y in (grad, matrix(rows, columns, dtype, "transposed"), matrix(rows, columns, dtype, "expanded")):
            check(aten.native_layer_norm.default, y, [columns], weight, bias, 1e-5, exact=full and y is grad)
            backward = aten.native_layer_norm_backward.default
            for wanted in ([True, True, True], [True, False, False]):
                args = (y, x, [columns], mean, rstd, weight, bias, wanted)
                check(backward, *args, exact=full and y is grad)
    image, grad = torch.randn(4, 32, 9, 9).to(dtype), torch.randn(4, 32, 9, 9).to(dtype)
    weight, bias = torch.ones(32).to(dtype), torch.zeros(32).to(dtype)
    for y in (grad, grad.to(memory_format=torch.channels_last)):
        x = image.to(memory_format=torch.channels_last) if y is not grad else image
        _, mean, rstd = aten.native_group_norm.default(x, weight, bias, 4, 32, 81, 4, 1e-5)
        check(aten.native_group_norm.default, x, weight, bias, 4, 32, 81, 4, 1e-5)
        args = (y, x, mean, rstd, weight, 4, 32, 81, 4, [True, True, True])
        check(aten.native_group_norm_backward.default, *args, exact=full and y is grad)
        running = (torch.zeros(32).to(dtype), torch.ones(32).to(dtype))
        args = (x, weight, bias, *running, True, 0.1, 1e-5)
        _, mean, rstd, *_ = aten._native_batch_norm_legit_functional.default(*args)
        check(aten._native_batch_norm_legit_functional.default, *args)
        args = (y, x, weight, *running, mean, rstd, True, 1e-5, [True, True, True])
        check(aten.native_batch_norm_backward.default, *args)


@pytest.mark.parametrize("dtype", FLOATS)
def test_lookups(dtype: torch.dtype) -> None:
    table, ids = torch.randn(50, 24).to(dtype), torch.randint(50, (6, 40))
    for index in (ids, torch.randint(50, (40,)).expand(6, 40), ids.int()):
        check(aten.embedding.default, table, index, exact=True)
        for grad in (torch.randn(6, 40, 24).to(dtype), torch.randn(24, 6, 40).to(dtype).permute(1, 2, 0)):
            check(aten.embedding_dense_backward.default, grad, index, 50, -1, False, exact=True)
    rows, row = torch.randint(24, (50, 3)), torch.randint(50, (40,))
    check(aten.gather.default, table, 1, rows)
    check(aten.scatter.src, table, 1, rows, torch.randn(50, 3).to(dtype))
    check(aten.scatter.value, table, 1, rows, -1.0)
    check(aten.scatter_add.default, table, 1, rows, torch.randn(50, 3).to(dtype))
    check(aten.index_select.default, table, 0, row)
    check(aten.index_add.default, table, 0, row, torch.randn(40, 24).to(dtype))
    for index in (row, row.int(), torch.randint(50, (80,))[::2]):
        check(aten.index.Tensor, table, [index])
        check(aten.index.Tensor, table, [None, index % 24])
        values = torch.randn(40, 24).to(dtype)
        for accumulate in (False, True):
            check(aten.index_put.default, table, [index], values, accumulate)
            check(aten._unsafe_index_put.default, table, [index], values, accumulate)
    check(aten.index.Tensor, table, [torch.rand(50) > 0.5])
    mask, values = torch.rand(6, 40, 1) > 0.5, torch.randn(6, 40, 24).to(dtype)
    check(aten._unsafe_masked_index_put_accumulate.default, table, mask, [ids], values)
    logits, labels = torch.randn(50, 24).to(dtype), torch.randint(24, (50,))
    _, total = aten.nll_loss_forward.default(logits, labels, None, 1, -100)
    check(aten.nll_loss_forward.default, logits, labels, None, 1, -100, exact=True)
    loss_grad = torch.ones((), dtype=dtype)
    check(aten.nll_loss_backward.default, loss_grad, logits, labels, None, 1, -100, total, exact=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dropout_activations_and_pooling(dtype: torch.dtype) -> None:
    x = torch.randn(8, 64, 12, 12).to(dtype)
    full = dtype == torch.float32
    check(aten.native_dropout.default, x, 0.1, True, exact=True)
    _, mask = aten.native_dropout.default(x, 0.1, True)
    check(aten.native_dropout_backward.default, x, mask, 1.1)
    for y in (x, x.transpose(1, 2), x[..., ::2]):
        for how in ("none", "tanh"):
            check(aten.gelu.default, y, approximate=how)
            check(aten.gelu_backward.default, y, y, approximate=how, exact=full and y is x)
        for target in (aten.silu.default, aten.relu.default, aten.tanh.default, aten.isinf.default):
            check(target, y)
        check(aten.silu_backward.default, y, y)
        check(aten.threshold_backward.default, y, y, 0)
    check(aten.mse_loss.default, x, x)
    pooled, indices = aten.max_pool2d_with_indices.default(x, [2, 2], [2, 2])
    check(aten.max_pool2d_with_indices.default, x, [2, 2], [2, 2])
    args = (pooled, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
    check(aten.max_pool2d_with_indices_backward.default, *args)
    check(aten.avg_pool2d.default, x, [2, 2])
    check(aten.avg_pool2d_backward.default, pooled, x, [2, 2], [], [0, 0], False, True, None)
    check(aten._adaptive_avg_pool2d.default, x, [3, 3])
    check(aten._adaptive_avg_pool2d_backward.default, torch.ones(8, 64, 1, 1).to(dtype).expand(8, 64, 3, 3), x)
    prims = torch.ops.prims
    check(prims._low_memory_max_pool_with_offsets.default, x, [2, 2], [2, 2], [0, 0], [1, 1], False)
    check(prims.fma.default, x, x, x)
    check(prims.convert_element_type.default, x, torch.float64)


def test_operators_that_make_or_shape_take_nothing() -> None:
    x = torch.randn(6, 10)
    calls = [
        (aten.arange.default, 100), (aten.full.default, [30, 30], 1.0), (aten.rand.default, [30, 30]),
        (aten.randint.default, 9, [30, 30]), (aten.randn.default, [30]), (aten.zeros_like.default, x),
        (aten.empty_strided.default, [4, 5], [5, 1]), (aten.view.default, x, [60]), (aten.t.default, x),
        (aten.expand.default, x, [3, 6, 10]), (aten.slice.Tensor, x, 0, 1, 3), (aten.split.Tensor, x, 2),
        (aten.unsqueeze.default, x, 0), (aten.select_backward.default, x, [4, 6, 10], 0, 1),
        (aten.slice_scatter.default, x, x[:2], 0, 0, 2), (aten.stack.default, [x, x]),
        (aten.detach.default, x),
    ]  # fmt: skip
    for target, *args in calls:
        check(target, *args, exact=True)


def test_fake_tensors_give_the_same_answer() -> None:
    args = (torch.randn(2, 4, 300, 16), torch.randn(2, 4, 300, 16), torch.randn(2, 4, 300, 16))
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    real = scratch.scratch_nbytes(target, args, {}, target(*args), 2)
    with FakeTensorMode() as mode:
        fakes = tree_map(mode.from_tensor, args)
        outputs = target(*fakes)
        assert scratch.scratch_nbytes(target, fakes, {}, outputs, 2) == real > 0
        mixed = (mode.from_tensor(torch.ones(4, 5)), mode.from_tensor(torch.ones(4, 5).bfloat16()))
        assert scratch.scratch_nbytes(aten.add.Tensor, mixed, {}, aten.add.Tensor(*mixed), 2) == 4 * 5 * 4


def test_an_operator_nobody_looked_at_gets_more_than_it_moves() -> None:
    x = torch.randn(64, 64)
    target = aten.linalg_pinv.atol_rtol_tensor
    assert not scratch.is_known(target)
    assert scratch.scratch_nbytes(target, (x,), {}, x, 2) > 2 * x.nbytes


def test_every_rule_names_an_operator() -> None:
    for name in {*scratch.RULES, *scratch.EXACT}:
        namespace, operator = name.split("::")
        if namespace != "transformers":
            assert hasattr(getattr(torch.ops, namespace), operator), name
    assert scratch.RULES.keys() >= scratch.EXACT


def test_measuring_sees_scratch() -> None:
    measured, outputs = measure(aten.native_dropout.default, (torch.randn(1000), 0.5, True), {})
    assert measured == 4000
    assert len(tree_leaves(outputs)) == 2
