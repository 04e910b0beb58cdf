"""More calls of ATen operators: indexing, losses, norms, pools, products, attention, convolution, linear algebra."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from operator_calls import Call, aten, call, family, layouts, prims
from torch import Tensor


def images(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    """Contiguous, channels last, and two images of every three."""
    x = torch.randn(shape).to(dtype)
    return [
        x,
        x.to(memory_format=torch.channels_last),
        torch.randn(shape[1], shape[0], *shape[2:]).to(dtype).transpose(0, 1),
    ]


@family
def lookups(dtype: torch.dtype) -> Iterator[Call]:
    table, ids = torch.randn(50, 24).to(dtype), torch.randint(50, (6, 40))
    for index in (ids, torch.randint(50, (40,)).expand(6, 40), ids.int()):
        yield call(aten.embedding.default, table, index)
        for grad in (torch.randn(6, 40, 24).to(dtype), torch.randn(24, 6, 40).to(dtype).permute(1, 2, 0)):
            yield call(aten.embedding_dense_backward.default, grad, index, 50, -1, False)
    yield call(aten.embedding_dense_backward.default, torch.randn(6, 40, 24).to(dtype), ids, 50, -1, True)
    rows, row = torch.randint(24, (50, 3)), torch.randint(50, (40,))
    source = torch.randn(50, 3).to(dtype)
    for base in (table, torch.randn(24, 50).to(dtype).t()):
        yield call(aten.gather.default, base, 1, rows)
        yield call(aten.gather.default, base, 1, torch.randint(24, (3, 50)).t())
        yield call(aten.scatter.src, base, 1, rows, source)
        yield call(aten.scatter.value, base, 1, rows, -1.0)
        yield call(aten.scatter_add.default, base, 1, rows, source)
        yield call(aten.scatter_reduce.two, base, 1, rows, source, "amax")
        yield call(aten.scatter_reduce.two, base, 1, rows, source, "mean", include_self=False)
        yield call(aten.scatter_reduce.two, base, 1, rows, source, "sum")
        yield call(aten.index_select.default, base, 0, row)
        yield call(aten.index_select.default, base, 1, row % 24)
        yield call(aten.index_add.default, base, 0, row, torch.randn(40, 24).to(dtype))
        yield call(aten.index_copy.default, base, 0, row, torch.randn(40, 24).to(dtype))
        yield call(aten.index_fill.int_Scalar, base, 0, row, 1.0)
        yield call(aten.index_reduce.default, base, 0, row, torch.randn(40, 24).to(dtype), "prod")
        yield call(aten.take.default, base, ids)
        yield call(aten.put.default, base, ids, torch.randn(6, 40).to(dtype), True)
        yield call(aten.masked_scatter.default, base, torch.rand(50, 24) > 0.5, torch.randn(50, 24).to(dtype))
        for index in (row, row.int(), torch.randint(50, (80,))[::2]):
            values = torch.randn(40, 24).to(dtype)
            yield call(aten.index.Tensor, base, [index])
            yield call(aten.index.Tensor, base, [None, index % 24])
            yield call(aten.index.Tensor, base, [index[:, None], index[None, :5] % 24])
            for accumulate in (False, True):
                yield call(aten.index_put.default, base, [index], values, accumulate)
                yield call(aten._unsafe_index_put.default, base, [index], values, accumulate)
        yield call(aten._unsafe_index.Tensor, base, [row])
        yield call(aten.index_put.default, base, [torch.rand(50, 24) > 0.5], torch.ones(()).to(dtype))
    mask, values = torch.rand(6, 40, 1) > 0.5, torch.randn(6, 40, 24).to(dtype)
    yield call(aten._unsafe_masked_index.default, torch.randn(50).to(dtype), mask[..., 0], [ids], 0)
    yield call(aten._unsafe_masked_index.default, torch.randn(50, 50).to(dtype), mask[..., 0], [ids, ids], 0.0)
    yield call(aten._unsafe_masked_index_put_accumulate.default, table, mask, [ids], values)
    bags, ends = torch.randint(50, (30,)), torch.tensor([0, 10, 20])
    for mode in (0, 1, 2):
        yield call(aten._embedding_bag.default, table, bags, ends, False, mode)
        yield call(aten._embedding_bag_forward_only.default, table, bags, ends, False, mode)
        for ids, begin in ((bags, ends), (torch.randint(50, (600,)), torch.arange(0, 600, 6))):
            out, owner, sizes, largest = aten._embedding_bag.default(table, ids, begin, False, mode)
            args = (torch.randn_like(out), ids, begin, owner, sizes, largest, 50, False, mode, False, None)
            yield call(aten._embedding_bag_backward.default, *args)
            if mode:
                args = (torch.randn_like(out), ids, owner, sizes, largest, 50, False, mode, None)
                yield call(aten._embedding_bag_dense_backward.default, *args)
    for num_rows in (50, 5000):
        grad = torch.randn(num_rows, 24).to(dtype)
        yield call(aten.masked_scatter_backward.default, grad, torch.rand(num_rows, 24) > 0.3, [num_rows * 24])
        yield call(aten.masked_scatter_backward.default, grad, torch.rand(num_rows, 1) > 0.3, [num_rows * 24])


@family
def losses(dtype: torch.dtype) -> Iterator[Call]:
    labels = torch.randint(24, (50,))
    for logits in layouts(dtype, 50, 24):
        for weight in (None, torch.rand(24).to(dtype)):
            for how in (0, 1, 2):
                loss, total = aten.nll_loss_forward.default(logits, labels, weight, how, -100)
                yield call(aten.nll_loss_forward.default, logits, labels, weight, how, -100)
                yield call(
                    aten.nll_loss_backward.default, torch.ones_like(loss), logits, labels, weight, how, -100, total
                )
        yield call(aten.mse_loss_backward.default, torch.ones(()).to(dtype), logits, logits, 1)
        yield call(aten.smooth_l1_loss_backward.default, torch.ones(()).to(dtype), logits, logits, 1, 1.0)
        yield call(aten.huber_loss_backward.default, torch.ones(()).to(dtype), logits, logits, 1, 1.0)
        for d in (0, 1):
            for forward, backward in (
                (aten._softmax.default, aten._softmax_backward_data.default),
                (aten._log_softmax.default, aten._log_softmax_backward_data.default),
            ):
                yield call(forward, logits, d, False)
                yield call(backward, torch.randn(50, 24).to(dtype), logits, d, dtype)
                yield call(backward, logits, torch.randn(50, 24).to(dtype), d, dtype)
            yield call(aten._safe_softmax.default, logits, d)
    maps, classes = torch.randn(2, 5, 6, 6).to(dtype), torch.randint(5, (2, 6, 6))
    _, total = aten.nll_loss2d_forward.default(maps, classes, None, 1, -100)
    yield call(aten.nll_loss2d_forward.default, maps, classes, None, 1, -100)
    yield call(aten.nll_loss2d_backward.default, torch.ones(()).to(dtype), maps, classes, None, 1, -100, total)
    yield call(
        aten.binary_cross_entropy_backward.default, torch.ones(()).to(dtype), maps.sigmoid(), maps.sigmoid(), None, 1
    )
    yield call(aten.soft_margin_loss_backward.default, torch.ones(()).to(dtype), maps, maps, 1)
    yield call(aten.multi_margin_loss.default, torch.randn(50, 24).to(torch.float32), labels)
    yield call(aten.multi_margin_loss_backward.default, torch.ones(()), torch.randn(50, 24), labels, 1, 1, None, 1)
    spoken = torch.randn(20, 2, 8).log_softmax(-1)
    targets, lengths, sizes = torch.randint(1, 8, (2, 5)), torch.tensor([20, 18]), torch.tensor([5, 4])
    yield call(aten._ctc_loss.default, spoken, targets, lengths.tolist(), sizes.tolist())
    yield call(aten._cdist_forward.default, torch.randn(2, 5, 6), torch.randn(2, 7, 6), 2.0, None)
    yield call(aten._cdist_forward.default, torch.randn(2, 5, 6), torch.randn(2, 7, 6), 1.0, None)
    yield call(aten._euclidean_dist.default, torch.randn(2, 5, 6), torch.randn(2, 7, 6))
    pairs = torch.randn(2, 5, 7)
    yield call(aten._cdist_backward.default, pairs, torch.randn(2, 5, 6), torch.randn(2, 7, 6), 1.0, pairs)
    yield call(aten._pdist_forward.default, torch.randn(5, 6))


@family
def norms(dtype: torch.dtype) -> Iterator[Call]:
    for rows, columns in ((32, 16), (520, 96)):
        for weight_dtype in {dtype, torch.float32}:
            weight, bias = torch.ones(columns).to(weight_dtype), torch.zeros(columns).to(weight_dtype)
            x = torch.randn(rows, columns).to(dtype)
            _, mean, rstd = aten.native_layer_norm.default(x, [columns], weight, bias, 1e-5)
            for y in layouts(dtype, rows, columns):
                yield call(aten.native_layer_norm.default, y, [columns], weight, bias, 1e-5)
                yield call(aten.native_layer_norm.default, y, [columns], None, None, 1e-5)
                for wanted in ([True, True, True], [True, False, False], [True, True, False]):
                    yield call(
                        aten.native_layer_norm_backward.default, y, x, [columns], mean, rstd, weight, bias, wanted
                    )
                yield call(
                    aten.native_layer_norm_backward.default,
                    x,
                    y,
                    [columns],
                    mean,
                    rstd,
                    weight,
                    None,
                    [True, True, False],
                )
    for dtypes in {(dtype, dtype), (dtype, torch.float32)}:
        weight, bias = torch.ones(32).to(dtypes[1]), torch.zeros(32).to(dtypes[1])
        running = (torch.zeros(32).to(dtypes[1]), torch.ones(32).to(dtypes[1]))
        grad = torch.randn(4, 32, 9, 9).to(dtype)
        for x in images(dtype, 4, 32, 9, 9)[:2]:
            _, mean, rstd = aten.native_group_norm.default(x, weight, bias, 4, 32, 81, 4, 1e-5)
            yield call(aten.native_group_norm.default, x, weight, bias, 4, 32, 81, 4, 1e-5)
            yield call(aten.native_group_norm.default, x, None, None, 4, 32, 81, 4, 1e-5)
            y = (
                grad.contiguous(memory_format=torch.channels_last)
                if x.is_contiguous(memory_format=torch.channels_last)
                else grad
            )
            args = (y, x, mean, rstd, weight, 4, 32, 81, 4, [True, True, True])
            yield call(aten.native_group_norm_backward.default, *args)
        for x in images(dtype, 4, 32, 9, 9):
            args = (x, weight, bias, *running, True, 0.1, 1e-5)
            _, mean, rstd, *_ = aten._native_batch_norm_legit_functional.default(*args)
            yield call(aten._native_batch_norm_legit_functional.default, *args)
            yield call(aten._native_batch_norm_legit_no_training.default, x, weight, bias, *running, 0.1, 1e-5)
            yield call(aten._native_batch_norm_legit.no_stats, x, weight, bias, True, 0.1, 1e-5)
            for y in (grad, grad.to(memory_format=torch.channels_last)):
                args = (y, x, weight, *running, mean, rstd, True, 1e-5, [True, True, True])
                yield call(aten.native_batch_norm_backward.default, *args)
                args = (y, x, weight, *running, mean, rstd, False, 1e-5, [True, True, True])
                yield call(aten.native_batch_norm_backward.default, *args)
    for x in layouts(dtype, 24, 40):
        yield call(aten._fused_rms_norm.default, x, [40], torch.ones(40).to(dtype), 1e-5)


@family
def pools(dtype: torch.dtype) -> Iterator[Call]:
    for x in images(dtype, 2, 8, 12, 12):
        pooled, indices = aten.max_pool2d_with_indices.default(x, [2, 2], [2, 2])
        yield call(aten.max_pool2d_with_indices.default, x, [2, 2], [2, 2])
        for grad in (pooled, pooled.contiguous()):
            args = (grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
            yield call(aten.max_pool2d_with_indices_backward.default, *args)
            yield call(aten.avg_pool2d_backward.default, grad, x, [2, 2], [], [0, 0], False, True, None)
        yield call(aten.avg_pool2d.default, x, [2, 2])
        yield call(aten._adaptive_avg_pool2d.default, x, [3, 3])
        yield call(aten._adaptive_avg_pool2d_backward.default, torch.ones(2, 8, 3, 3).to(dtype), x)
        yield call(aten._adaptive_avg_pool2d_backward.default, torch.ones(2, 8, 1, 1).to(dtype).expand(2, 8, 3, 3), x)
        small, at = aten.adaptive_max_pool2d.default(x, [3, 3])
        yield call(aten.adaptive_max_pool2d.default, x, [3, 3])
        yield call(aten.adaptive_max_pool2d_backward.default, small, x, at)
        yield call(aten.upsample_nearest2d.default, x, [24, 24])
        yield call(
            aten.upsample_nearest2d_backward.default, torch.randn(2, 8, 24, 24).to(dtype), [24, 24], [2, 8, 12, 12]
        )
        yield call(aten.upsample_bilinear2d.default, x, [24, 24], False)
        yield call(
            aten.upsample_bilinear2d_backward.default,
            torch.randn(2, 8, 24, 24).to(dtype),
            [24, 24],
            [2, 8, 12, 12],
            False,
        )
        wide = torch.randn(2, 16, 24, 24).to(dtype).to(memory_format=torch.channels_last)
        for given in (wide, wide[:, :8]):  # a part: of one of several images that were joined
            to = ([24, 24], [2, given.shape[1], 12, 12])
            yield call(aten.upsample_nearest2d_backward.default, given, *to)
            yield call(aten.upsample_bilinear2d_backward.default, given, *to, False)
            yield call(aten.upsample_bicubic2d_backward.default, given, *to, False)
            if dtype == torch.float32:
                yield call(aten._upsample_bilinear2d_aa_backward.default, given, *to, False)
        yield call(aten.upsample_bicubic2d.default, x, [24, 24], False)
        yield call(
            aten.upsample_bicubic2d_backward.default,
            torch.randn(2, 8, 24, 24).to(dtype),
            [24, 24],
            [2, 8, 12, 12],
            False,
        )
        if dtype == torch.float32:
            yield call(aten._upsample_bilinear2d_aa.default, x, [24, 24], False)
        if dtype == torch.float32:
            yield call(aten._upsample_bicubic2d_aa.default, x, [6, 6], False)
        if dtype == torch.float32:
            yield call(
                aten._upsample_bilinear2d_aa_backward.default,
                torch.randn(2, 8, 24, 24).to(dtype),
                [24, 24],
                [2, 8, 12, 12],
                False,
            )
        yield call(aten.max_unpool2d.default, pooled, indices, [12, 12])
        samples = torch.rand(2, 8, 2).to(dtype)
        args = (x, [3, 3], [6, 6], samples)
        yield call(aten.fractional_max_pool2d.default, *args)
        fewer, at = aten.fractional_max_pool2d.default(*args)
        yield call(aten.fractional_max_pool2d_backward.default, fewer, x, [3, 3], [6, 6], at)
        yield call(aten.grid_sampler_2d.default, x, torch.rand(2, 5, 5, 2).to(dtype), 0, 0, False)
        if dtype == torch.float32:
            args = (torch.randn(2, 8, 5, 5), x, torch.rand(2, 5, 5, 2), 0, 0, False, [True, True])
            yield call(aten.grid_sampler_2d_backward.default, *args)
        for op in ("reflection_pad2d", "replication_pad2d"):
            yield call(getattr(aten, op).default, x, [1, 1, 2, 2])
            grad = torch.randn(2, 8, 16, 14).to(dtype)
            yield call(getattr(aten, op + "_backward").default, grad, x, [1, 1, 2, 2])
        args = (x, [2, 2], [2, 2], [0, 0], [1, 1], False)
        yield call(prims._low_memory_max_pool_with_offsets.default, *args)
    line, volume = torch.randn(2, 8, 12).to(dtype), torch.randn(2, 4, 6, 6, 6).to(dtype)
    for op in ("reflection_pad1d", "replication_pad1d"):
        yield call(getattr(aten, op).default, line, [1, 1])
        yield call(getattr(aten, op + "_backward").default, torch.randn(2, 8, 14).to(dtype), line, [1, 1])
    for op in ("reflection_pad3d", "replication_pad3d"):
        yield call(getattr(aten, op).default, volume, [1] * 6)
        yield call(getattr(aten, op + "_backward").default, torch.randn(2, 4, 8, 8, 8).to(dtype), volume, [1] * 6)
    yield call(aten.upsample_nearest1d.default, line, [24])
    yield call(aten.upsample_nearest1d_backward.default, torch.randn(2, 8, 24).to(dtype), [24], [2, 8, 12])
    yield call(aten.upsample_linear1d.default, line, [24], False)
    yield call(aten.upsample_linear1d_backward.default, torch.randn(2, 8, 24).to(dtype), [24], [2, 8, 12], False)
    yield call(aten.upsample_nearest3d.default, volume, [12, 12, 12])
    yield call(aten.upsample_trilinear3d.default, volume, [12, 12, 12], False)
    cubes, at = aten.max_pool3d_with_indices.default(volume, [2] * 3, [2] * 3)
    yield call(aten.max_pool3d_with_indices.default, volume, [2] * 3, [2] * 3)
    yield call(
        aten.max_pool3d_with_indices_backward.default, cubes, volume, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, at
    )
    if dtype == torch.float32:
        yield call(aten.avg_pool3d.default, volume, [2] * 3)
    if dtype == torch.float32:
        yield call(aten.avg_pool3d_backward.default, cubes, volume, [2] * 3, [2] * 3, [0] * 3, False, True, None)
    yield call(aten._adaptive_avg_pool3d.default, volume, [2] * 3)
    yield call(aten._adaptive_avg_pool3d_backward.default, torch.randn(2, 4, 2, 2, 2).to(dtype), volume)


@family
def products(dtype: torch.dtype) -> Iterator[Call]:
    for a in layouts(dtype, 33, 77):
        for b in layouts(dtype, 77, 129):
            yield call(aten.mm.default, a, b)
            yield call(aten.addmm.default, torch.randn(129).to(dtype), a, b)
        yield call(aten.mv.default, a, torch.randn(77).to(dtype))
        yield call(aten.addmv.default, torch.randn(33).to(dtype), a, torch.randn(77).to(dtype))
    for a in layouts(dtype, 8, 16, 24):
        for b in layouts(dtype, 8, 24, 16):
            yield call(aten.bmm.default, a, b)
            yield call(aten.baddbmm.default, torch.randn(8, 16, 16).to(dtype), a, b)
    yield call(aten.dot.default, torch.randn(50).to(dtype), torch.randn(50).to(dtype))
    yield call(aten.addr.default, torch.randn(5, 6).to(dtype), torch.randn(5).to(dtype), torch.randn(6).to(dtype))


@family
def linear_algebra(dtype: torch.dtype) -> Iterator[Call]:
    if dtype != torch.float32:
        return
    for batch in ((), (3,)):
        square = torch.randn(*batch, 8, 8)
        definite = square @ square.mT + 8 * torch.eye(8)
        right = torch.randn(*batch, 8, 2)
        yield call(aten.linalg_cholesky_ex.default, definite)
        yield call(aten.linalg_inv_ex.default, definite)
        yield call(aten.linalg_lu_factor_ex.default, definite)
        yield call(aten.linalg_qr.default, square)
        yield call(aten._linalg_svd.default, square)
        yield call(aten._linalg_eigh.default, definite)
        yield from (call(aten.linalg_matrix_exp.default, square * scale) for scale in (1e-6, 0.05, 1.0, 10.0))
        yield call(aten._linalg_det.default, definite)
        yield call(aten._linalg_slogdet.default, definite)
        yield call(aten._linalg_solve_ex.default, definite, right)
        yield call(aten.linalg_solve_triangular.default, definite.tril(), right, upper=False)
        yield call(aten.triangular_solve.default, right, definite)
        factors, pivots, _ = aten.linalg_lu_factor_ex(definite)
        yield call(aten.linalg_lu_solve.default, factors, pivots, right)
        yield call(aten.cholesky_solve.default, right, definite)
        yield call(aten.linalg_cross.default, torch.randn(4, 3), torch.randn(4, 3))
    yield call(aten._fft_r2c.default, torch.randn(4, 32), [1], 0, True)
    yield call(aten._fft_c2r.default, torch.randn(4, 17, dtype=torch.complex64), [1], 2, 32)
    yield call(aten._fft_c2c.default, torch.randn(4, 16, dtype=torch.complex64), [1], 0, True)
    yield call(aten._conj.default, torch.randn(4, 16, dtype=torch.complex64))
    yield call(aten._conj_physical.default, torch.randn(4, 16, dtype=torch.complex64))
    yield call(aten.mm.default, torch.randn(4, 16, dtype=torch.complex64), torch.randn(16, 3, dtype=torch.complex64))


@family
def random_numbers(dtype: torch.dtype) -> Iterator[Call]:
    scalar = torch.ones(()).to(dtype)
    yield call(aten.normal.float_float, 0.0, 1.0, [64, 32], dtype=dtype)
    for x in (*layouts(dtype, 64, 32), *layouts(dtype, 80, 90)):
        positive = x.abs() if x.numel() == x.untyped_storage().nbytes() // x.itemsize else x * 0 + 1
        for target in (aten.normal_functional, aten.uniform, aten.random, aten.exponential):
            yield call(target.default, x)
        yield call(aten.bernoulli.p, x, 0.5)
        yield call(aten.poisson.default, positive)
        yield call(aten.normal.Tensor_float, x)
        yield call(aten.normal.float_Tensor, 0.0, positive)
        yield call(aten.normal.Tensor_Tensor, x, positive)
        yield call(aten.normal.Tensor_Tensor, x, scalar)
        yield call(aten.normal.Tensor_Tensor, scalar, positive)
        for noise in (torch.rand(x.shape).to(dtype), torch.rand_like(x)):
            for training in (True, False):
                yield call(aten.rrelu_with_noise_functional.default, x, noise, 0.1, 0.3, training)
            yield call(aten.rrelu_with_noise_backward.default, x, x, noise, 0.1, 0.3, True, False)
        if dtype == torch.float32:
            yield call(aten._standard_gamma.default, positive)
            yield call(aten.binomial.default, positive.round(), positive.sigmoid())


@family
def numbers_as_tensors(dtype: torch.dtype) -> Iterator[Call]:
    for number in (3, 2.5, True):
        yield call(aten._to_copy.default, number, dtype=dtype)


@family
def weight_norms(dtype: torch.dtype) -> Iterator[Call]:
    for shape in ((48, 16, 3), (64, 32), (32, 64, 5, 3), (16, 100)):
        for dim in (0, len(shape) - 1):
            direction = torch.randn(shape).to(dtype)
            length = torch.rand([n if i == dim else 1 for i, n in enumerate(shape)]).to(dtype)
            _, norm = aten._weight_norm_interface.default(direction, length, dim)
            yield call(aten._weight_norm_interface.default, direction, length, dim)
            gradient = torch.randn(shape).to(dtype)
            yield call(aten._weight_norm_interface_backward.default, gradient, direction, length, norm, dim)


@family
def assertions(dtype: torch.dtype) -> Iterator[Call]:
    true = torch.ones((), dtype=torch.bool)
    yield call(aten._assert_async.msg, true, "no")
    yield call(aten._functional_assert_async.msg, true, "no", torch.ones(()))


@family
def positions_and_windows(dtype: torch.dtype) -> Iterator[Call]:
    for aligned in (False, True):
        yield call(aten.affine_grid_generator.default, torch.randn(4, 2, 3).to(dtype), [4, 3, 20, 24], aligned)
        yield call(aten.affine_grid_generator.default, torch.randn(1, 2, 3).to(dtype), [1, 3, 64, 64], aligned)
        yield call(aten.affine_grid_generator.default, torch.randn(2, 3, 4).to(dtype), [2, 3, 8, 10, 12], aligned)
    for window in (aten.hann_window, aten.hamming_window, aten.blackman_window, aten.bartlett_window):
        for length in (64, 4001):
            yield call(window.default, length)
            yield call(window.periodic, length, False)
    x = torch.randn(20, 300).to(dtype)
    for d in (0, 1):
        yield call(aten.logcumsumexp.default, x, d)
    yield call(aten.block_diag.default, [x, x.t()])
    yield call(aten.segment_reduce.default, x, "sum", lengths=torch.full((4,), 5))


@family
def gradients_of_samples(dtype: torch.dtype) -> Iterator[Call]:
    if dtype != torch.float32:
        return
    positive = torch.rand(50, 20) + 0.1
    yield call(aten._standard_gamma_grad.default, positive, positive)
    yield call(aten._dirichlet_grad.default, positive, positive, positive)
