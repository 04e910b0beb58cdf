"""Calls of ATen operators whose scratch is measured against the table: sizes, dtypes and strides that models have.

`conftest.py` registers this file as module `operator_calls`. More families stand in `operator_calls_2.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

aten, prims = torch.ops.aten, torch.ops.prims
Call = tuple[Any, tuple, dict[str, Any]]
FAMILIES: dict[str, Callable[[torch.dtype], Iterator[Call]]] = {}


def family(make: Callable[[torch.dtype], Iterator[Call]]) -> Callable[[torch.dtype], Iterator[Call]]:
    """Register a family of calls; it is measured for every dtype in `DTYPES`."""
    FAMILIES[make.__name__] = make
    return make


def call(target: Any, *args: Any, **kwargs: Any) -> Call:
    return target, args, kwargs


def layouts(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    """The same shape contiguous, with two dimensions swapped in memory, strided inside, and expanded."""
    x = torch.randn(shape).to(dtype)
    found = [x]
    if len(shape) > 1:
        swapped = (*shape[:-2], shape[-1], shape[-2])
        found.append(torch.randn(swapped).to(dtype).mT)
        found.append(torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., ::2])
        found.append(torch.randn(shape[1:]).to(dtype).expand(shape))
    return found


def words(text: str) -> list[str]:
    return text.split()


UNARY = words(
    """
    abs neg exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh
    tanh asinh acosh atanh erf erfc erfinv sigmoid relu silu gelu hardswish hardsigmoid hardtanh softplus elu
    leaky_relu floor ceil round trunc frac sign sgn square logit lgamma digamma isnan isinf isfinite
    logical_not nan_to_num signbit bitwise_not celu mish log_sigmoid_forward sinc i0 special_entr positive
    deg2rad rad2deg hardshrink softshrink
    """
)

BINARY = words(
    """
    add sub mul div pow maximum minimum atan2 eq ne lt le gt ge fmod remainder floor_divide logical_and
    logical_or logical_xor hypot copysign fmax fmin xlogy logaddexp logaddexp2 nextafter ldexp heaviside
    bitwise_and bitwise_or bitwise_xor gcd
    """
)

WITH_NUMBER = words(
    """
    add sub mul div pow eq ne lt le gt ge fmod remainder rsub floor_divide clamp_min clamp_max
    """
)


def overload(name: str, *candidates: str) -> Any:
    packet = getattr(aten, name)
    return next(getattr(packet, c) for c in candidates if hasattr(packet, c))


@family
def unary(dtype: torch.dtype) -> Iterator[Call]:
    for name in UNARY:
        if name == "bitwise_not":
            yield call(aten.bitwise_not.default, torch.randint(9, (6, 10)))
            continue
        for x in layouts(dtype, 24, 40):
            yield call(getattr(aten, name).default, x)
        if name in (
            "exp",
            "sqrt",
            "sin",
            "sigmoid",
            "reciprocal",
            "isnan",
            "abs",
            "neg",
            "sign",
            "floor",
            "logical_not",
        ):
            yield call(getattr(aten, name).default, torch.randint(1, 9, (6, 10)))


@family
def binary(dtype: torch.dtype) -> Iterator[Call]:
    for name in BINARY:
        target = overload(name, "Tensor", "Tensor_Tensor", "default")
        if name.startswith("bitwise") or name == "gcd":
            yield call(target, torch.randint(9, (6, 7)), torch.randint(9, (7,)))
            yield call(target, torch.randint(9, (6, 7)).int(), torch.randint(9, (7,)))
            continue
        for x in layouts(dtype, 24, 40):
            yield call(target, x, torch.rand(24, 40).to(dtype))
            yield call(target, x, torch.rand(40).to(dtype))
        if name == "nextafter":
            continue
        if name not in ("heaviside", "ldexp"):
            yield call(target, torch.ones(6, 7).to(dtype), torch.ones(6, 7, dtype=torch.float64))
            yield call(target, torch.ones(6, 7).to(dtype), torch.ones(7, dtype=torch.int64))
            yield call(target, torch.ones(6, 7).to(dtype), torch.ones(()))
            yield call(target, torch.ones(6, 7, dtype=torch.int32), torch.ones(6, 7).to(dtype))


@family
def with_number(dtype: torch.dtype) -> Iterator[Call]:
    for name in WITH_NUMBER:
        compares = name in ("eq", "ne", "lt", "le", "gt", "ge", "fmod", "remainder")
        second = overload(name, "Scalar") if compares else overload(name, "Tensor", "default", "Scalar")
        for target in (overload(name, "Scalar", "Tensor_Scalar", "default"), second):
            if target in (aten.clamp_min.Tensor, aten.clamp_max.Tensor, aten.rsub.Tensor):
                continue
            if name == "pow":
                target = aten.pow.Tensor_Scalar
            for number in (2, 0.5):
                yield call(target, torch.ones(5, 6).to(dtype), number)
                if name != "pow" or number == 2:
                    yield call(target, torch.ones(5, 6, dtype=torch.int64), number)
    x = torch.ones(5, 6).to(dtype)
    mask = x > 0
    yield call(aten.pow.Scalar, 2.0, x)
    yield call(aten.add.Tensor, x, x, alpha=2)
    yield call(aten.add.Tensor, x, 2, alpha=3)
    for y in (x, torch.ones(6, 5).to(dtype).t()):
        yield call(aten.clamp.default, y, -1, 1)
        yield call(aten.clamp.default, y, None, 0.5)
        yield call(aten.clamp.Tensor, y, torch.zeros(()).to(dtype), None)
        yield call(aten.masked_fill.Scalar, y, mask, 1.0)
        yield call(aten.masked_fill.Tensor, y, mask, torch.ones(()))
        yield call(aten.where.self, mask, y, torch.zeros(()).to(dtype))
        yield call(aten.where.self, mask, y, torch.zeros(6, dtype=torch.float64))
        yield call(aten.where.ScalarOther, mask, y, 1.0)
        yield call(aten.where.ScalarSelf, mask, 0.0, y)
        yield call(aten.lerp.Scalar, y, x, 0.5)
        yield call(aten.lerp.Tensor, y, x, x)
        yield call(aten.addcmul.default, y, x, x, value=2)
        yield call(aten.addcdiv.default, y, x, x)
        yield call(aten.threshold.default, y, 0.1, 0)
        yield call(aten.threshold_backward.default, x, y, 0)
        yield call(aten.sigmoid_backward.default, x, y)
        yield call(aten.tanh_backward.default, x, y)
        yield call(aten.silu_backward.default, x, y)
        yield call(aten.gelu_backward.default, x, y)
        yield call(aten.gelu_backward.default, x, y, approximate="tanh")
        yield call(aten.leaky_relu_backward.default, x, y, 0.1, False)
        yield call(aten.elu_backward.default, x, 1.0, 1.0, 1.0, False, y)
        yield call(aten.hardswish_backward.default, x, y)
        yield call(aten.hardsigmoid_backward.default, x, y)
        yield call(aten.hardtanh_backward.default, x, y, -1, 1)
        yield call(aten.softplus_backward.default, x, y, 1, 20)
        yield call(aten.mish_backward.default, x, y)
        yield call(aten.logit_backward.default, x, y, None)
        yield call(aten._prelu_kernel.default, y, torch.ones(1, 6).to(dtype))
        yield call(aten._prelu_kernel_backward.default, x, y, torch.ones(1, 6).to(dtype))
        yield call(aten.glu.default, y, -1)
        yield call(aten.glu_backward.default, torch.ones(5, 3).to(dtype), y, -1)
        yield call(aten.log_sigmoid_backward.default, x, y, x)
        yield call(aten.polygamma.default, 1, y)
    yield call(aten.add_.Tensor, torch.ones(5, 6).to(dtype), torch.ones(5, 6, dtype=torch.float32))
    yield call(aten.add_.Tensor, torch.ones(5, 6).to(dtype), 1)
    yield call(aten.mul_.Tensor, torch.ones(5, 6).to(dtype), torch.ones(6).to(dtype))
    yield call(aten.copy_.default, torch.ones(5, 6), x)
    yield call(aten.fill_.Scalar, torch.ones(5, 6), 1.0)
    yield call(aten.complex.default, torch.ones(5, 6), torch.ones(5, 6))
    yield call(aten.polar.default, torch.ones(5, 6), torch.ones(5, 6))
    yield call(aten.view_as_real.default, torch.ones(5, 6, dtype=torch.complex64))
    yield call(aten.mul.Tensor, torch.ones(5, 6, dtype=torch.complex64), torch.ones(5, 6))
    yield call(aten.mul.Tensor, torch.ones(5, 6, dtype=torch.complex64), 1j)
    yield call(aten.abs.default, torch.ones(5, 6, dtype=torch.complex64))
    yield call(aten.angle.default, torch.ones(5, 6, dtype=torch.complex64))
    yield call(aten.isin.Tensor_Tensor, torch.arange(50), torch.arange(5))
    yield call(prims.convert_element_type.default, x, torch.float64)
    yield call(prims.fma.default, torch.ones(5, 6), torch.ones(5, 6), torch.ones(5, 6))


@family
def reductions(dtype: torch.dtype) -> Iterator[Call]:
    for x in (*layouts(dtype, 24, 40), torch.randn(4, 5, 6, 7).to(dtype), torch.randn(200, 300).to(dtype)):
        dims: tuple[list[int], ...] = ([0], [1], [-1, 0]) if x.dim() == 2 else ([0], [1], [2, 3], [0, 2], [1, 3])
        for dim in dims:
            for keep in (False, True):
                yield call(aten.sum.dim_IntList, x, dim, keep)
                yield call(aten.mean.dim, x, dim, keep)
                yield call(aten.amax.default, x, dim, keep)
                yield call(aten.amin.default, x, dim, keep)
                yield call(aten.var.correction, x, dim, correction=0, keepdim=keep)
                yield call(aten.std.correction, x, dim, correction=1, keepdim=keep)
                yield call(aten.var_mean.correction, x, dim, correction=0, keepdim=keep)
                yield call(aten.linalg_vector_norm.default, x, 2, dim, keep)
                yield call(aten.logsumexp.default, x, dim, keep)
            yield call(aten.sum.dim_IntList, x, dim, dtype=torch.float32)
            yield call(aten.sum.dim_IntList, x, dim, dtype=torch.float64)
            yield call(aten.mean.dim, x, dim, dtype=torch.float32)
            yield call(aten.nansum.default, x, dim)
            yield call(aten.linalg_vector_norm.default, x, 1, dim)
            yield call(aten.linalg_vector_norm.default, x, 2, dim, dtype=torch.float32)
            yield call(aten.norm.ScalarOpt_dim, x, 2, dim)
        for d in (0, 1, -1):
            for target in (
                aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.any.dim, aten.all.dim,
                aten.prod.dim_int, aten.mode.default, aten.median.dim, aten.aminmax.default,
            ):  # fmt: skip
                if target is aten.aminmax.default:
                    yield call(target, x, dim=d)
                else:
                    yield call(target, x, d)
        for target in (
            aten.sum.default, aten.mean.default, aten.max.default, aten.min.default, aten.any.default,
            aten.all.default, aten.prod.default, aten.argmax.default, aten.argmin.default, aten.amax.default,
            aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.linalg_vector_norm.default,
            aten.norm.Scalar, aten.aminmax.default, aten.median.default, aten.trace.default, aten.count_nonzero.default,
        ):  # fmt: skip
            if target is not aten.trace.default or x.dim() == 2:
                yield call(target, x)
        yield call(aten.sum.default, x, dtype=torch.float32)
        yield call(aten.mean.default, x, dtype=torch.float32)
    for x in (torch.rand(64, 50) > 0.5, torch.randint(9, (64, 50)), torch.randint(9, (64, 50)).int()):
        for target in (aten.sum.default, aten.any.default, aten.all.default, aten.prod.default, aten.max.default):
            yield call(target, x)
        for target in (
            aten.any.dim,
            aten.all.dim,
            aten.max.dim,
            aten.argmax.default,
            aten.prod.dim_int,
            aten.cumsum.default,
        ):
            if target is not aten.argmax.default or x.dtype != torch.bool:
                yield call(target, x, 0)
        yield call(aten.sum.dim_IntList, x, [1])
        yield call(aten.sum.dim_IntList, x, [1], dtype=torch.float32)
        yield call(aten.mean.dim, x, [1], dtype=torch.float32)


@family
def scans_and_sorts(dtype: torch.dtype) -> Iterator[Call]:
    for x in layouts(dtype, 24, 40):
        for d in (0, 1):
            yield call(aten.cumsum.default, x, d)
            yield call(aten.cumsum.default, x, d, dtype=torch.float64)
            yield call(aten.cumprod.default, x, d)
            yield call(aten.logcumsumexp.default, x, d)
            yield call(aten.cummax.default, x, d)
            yield call(aten.cummin.default, x, d)
            yield call(aten.sort.default, x, d)
            yield call(aten.sort.stable, x, stable=True, dim=d, descending=True)
            yield call(aten.topk.default, x, 3, d)
            yield call(aten.kthvalue.default, x, 3, d)
            yield call(aten.flip.default, x, [d])
            yield call(aten.roll.default, x, [1], [d])
            yield call(aten.renorm.default, x, 2, d, 1.0)
            if dtype == torch.float32:
                yield call(aten.quantile.default, x, torch.tensor([0.2, 0.5]), d)
                yield call(aten.quantile.scalar, x, 0.5, d)
                yield call(aten.nanmedian.dim, x, d)
        yield call(aten.roll.default, x, [1])
        yield call(aten.tril.default, x)
        yield call(aten.triu.default, x, 1)
        yield call(aten.diagonal_copy.default, x)
        yield call(aten.rot90.default, x)
    yield call(aten.sort.default, torch.randn(7).to(dtype))
    yield call(aten.sort.default, torch.randint(99, (4000,)))
    yield call(aten.cumsum.default, torch.ones(6, 50, dtype=torch.int64), 1, dtype=torch.int32)
    yield call(aten.cumsum.default, torch.rand(6, 50) > 0.5, 1)
    yield call(aten.argsort.default, torch.randn(6, 50).to(dtype))
    yield call(aten.searchsorted.Tensor, torch.arange(10.0), torch.rand(6, 5))
    yield call(aten.bucketize.Tensor, torch.rand(6, 5), torch.arange(10.0))
    yield call(aten.bucketize.Tensor, torch.rand(6, 5), torch.arange(10.0), out_int32=True)
    yield call(aten.histc.default, torch.rand(1000), 16, 0.0, 1.0)
    yield call(aten.histc.default, torch.rand(1000), 16)
    yield call(aten.diff.default, torch.randn(6, 50).to(dtype))
    yield call(aten.tril_indices.default, 5, 5)


@family
def shaping(dtype: torch.dtype) -> Iterator[Call]:
    for x in layouts(dtype, 24, 40):
        yield call(aten.clone.default, x)
        yield call(aten.clone.default, x, memory_format=torch.contiguous_format)
        yield call(aten._to_copy.default, x, dtype=torch.float64)
        yield call(aten._to_copy.default, x, dtype=torch.float32)
        yield call(aten.cat.default, [x, x], 0)
        yield call(aten.cat.default, [x, x], 1)
        yield call(aten.cat.default, [x, torch.randn(24, 40)], 1)
        yield call(aten.stack.default, [x, x], 1)
        yield call(aten.constant_pad_nd.default, x, [1, 1], 0.0)
        yield call(aten.constant_pad_nd.default, x, [1, 1, 0, 2], 1.5)
        yield call(aten.repeat.default, x, [2, 1])
        yield call(aten.repeat.default, x, [2, 3, 1, 2])
        yield call(aten.repeat_interleave.self_int, x, 2, 0)
        yield call(aten.slice_scatter.default, x, torch.randn(24, 2).to(dtype), 1, 1, 3)
        yield call(aten.select_scatter.default, x, torch.randn(24).to(dtype), 1, 1)
        yield call(aten.copy.default, x, torch.randn(24, 40))
        yield call(aten.copy.default, x, torch.randn(40).to(dtype))
        yield call(aten._unsafe_view.default, x.contiguous(), [960])
        yield call(aten.as_strided.default, x, [3, 3], [1, 2])
        yield call(aten.diag_embed.default, x)
        yield call(aten.full_like.default, x, 1.0)
        yield call(aten.zeros_like.default, x)
        yield call(aten.ones_like.default, x)
        yield call(aten.new_zeros.default, x, [3, 4])
        yield call(aten.new_full.default, x, [3, 4], 1)
        yield call(aten.new_ones.default, x, [], dtype=torch.bool)
        yield call(aten.empty_like.default, x)
        yield call(aten.rand_like.default, x)
        yield call(aten.randn_like.default, x)
        yield call(aten.bernoulli.p, x, 0.3)
        yield call(aten.native_dropout.default, x, 0.3, True)
        yield call(aten.native_dropout_backward.default, torch.randn(24, 40).to(dtype), x > 0, 1.4)
    y = torch.randn(2, 3, 8, 8).to(dtype)
    yield call(aten.select_backward.default, y, [2, 3, 4, 8, 8], 2, 1)
    yield call(aten.slice_backward.default, y, [2, 3, 8, 20], 3, 2, 18, 2)
    yield call(aten.diagonal_backward.default, torch.randn(6).to(dtype), [6, 6], 0, 0, 1)
    yield call(aten.unfold.default, y, 3, 2, 2)
    yield call(aten.unfold_backward.default, torch.randn(2, 3, 8, 4, 2).to(dtype), [2, 3, 8, 8], 3, 2, 2)
    yield call(aten.im2col.default, y, [3, 3], [1, 1], [1, 1], [1, 1])
    yield call(aten.col2im.default, torch.randn(2, 27, 64).to(dtype), [8, 8], [3, 3], [1, 1], [1, 1], [1, 1])
    yield call(aten.pixel_shuffle.default, torch.randn(2, 12, 4, 4).to(dtype), 2)
    yield call(aten.pixel_unshuffle.default, y, 2)
    yield call(aten.channel_shuffle.default, torch.randn(2, 4, 4, 4).to(dtype), 2)
    yield call(aten.meshgrid.default, [torch.arange(4), torch.arange(5)])
    yield call(aten.arange.default, 50)
    yield call(aten.arange.start_step, 0, 50, 2, dtype=torch.float32)
    yield call(aten.linspace.default, 0, 1, 50)
    yield call(aten.full.default, [4, 5], 2.0)
    yield call(aten.zeros.default, [4, 5])
    yield call(aten.eye.default, 7)
    yield call(aten.rand.default, [4, 50])
    yield call(aten.randn.default, [4, 50])
    yield call(aten.randint.low, 0, 9, [4, 5])
    yield call(aten.randperm.default, 60)
    yield call(aten.randperm.default, 5000)
    yield call(aten.scalar_tensor.default, 2.0)
    yield call(aten.lift_fresh_copy.default, torch.tensor(3))
    yield call(aten.bernoulli.default, torch.rand(4, 5).to(dtype))
    yield call(aten.multinomial.default, torch.rand(4, 50), 1)
    yield call(aten.multinomial.default, torch.rand(4, 50), 5, True)
    yield call(aten.multinomial.default, torch.rand(4, 50), 5)
    yield call(
        prims.iota.default, 9, start=0, step=1, dtype=torch.int64, device=torch.device("cpu"), requires_grad=False
    )
    for z in (y, y.to(memory_format=torch.channels_last), torch.randn(3, 2, 8, 8).to(dtype).transpose(0, 1)):
        yield call(aten.clone.default, z)
        yield call(aten.flip.default, z, [2, 3])
        yield call(aten.cat.default, [z, z], 1)
        yield call(aten.roll.default, z, [1, 2], [2, 3])
