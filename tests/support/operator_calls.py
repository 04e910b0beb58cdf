"""Calls of ATen operators, for measuring their scratch against the table.

They have sizes, dtypes and strides of real models.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

aten, prims = torch.ops.aten, torch.ops.prims
Call = tuple[Any, tuple, dict[str, Any]]
FAMILIES: dict[str, Callable[[torch.dtype], Iterator[Call]]] = {}
GONE = frozenset() if hasattr(aten, "cholesky") else frozenset({"aten::cholesky"})
"""Operators with a rule that this PyTorch has no more: 2.14 lacks `cholesky`."""


def family(make: Callable[[torch.dtype], Iterator[Call]]) -> Callable[[torch.dtype], Iterator[Call]]:
    """Register a family of calls; it is measured for every dtype in `DTYPES`."""
    FAMILIES[make.__name__] = make
    return make


def call(target: Any, *args: Any, **kwargs: Any) -> Call:
    return target, args, kwargs


def layouts(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    """Return tensors of one shape: contiguous, with two dimensions swapped in memory, strided, and expanded."""
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

WITH_NUMBER = words("add sub mul div pow eq ne lt le gt ge fmod remainder rsub floor_divide clamp_min clamp_max")

OF_INTEGERS = words("exp sqrt sin sigmoid reciprocal isnan abs neg sign floor logical_not")


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
        if name in OF_INTEGERS:
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
        for name in words("sigmoid tanh silu gelu hardswish hardsigmoid mish"):
            yield call(getattr(aten, f"{name}_backward").default, x, y)
        yield call(aten.gelu_backward.default, x, y, approximate="tanh")
        yield call(aten.leaky_relu_backward.default, x, y, 0.1, False)
        yield call(aten.elu_backward.default, x, 1.0, 1.0, 1.0, False, y)
        yield call(aten.hardtanh_backward.default, x, y, -1, 1)
        yield call(aten.softplus_backward.default, x, y, 1, 20)
        yield call(aten.logit_backward.default, x, y, None)
        yield call(aten._prelu_kernel.default, y, torch.ones(1, 6).to(dtype))
        yield call(aten._prelu_kernel_backward.default, x, y, torch.ones(1, 6).to(dtype))
        yield call(aten.glu.default, y, -1)
        yield call(aten.glu_backward.default, torch.ones(5, 3).to(dtype), y, -1)
        yield call(aten.log_sigmoid_backward.default, x, y, x)
        yield call(aten.polygamma.default, 1, y)
    for name, y in itertools.product(("eq_", "lt_"), (x, torch.ones(5, 6, dtype=torch.int64), mask)):
        yield call(getattr(aten, name).Scalar, y.clone(), 0.5)
        for other in (x, torch.ones(6, dtype=torch.float64), mask):
            yield call(getattr(aten, name).Tensor, y.clone(), other)
    for other in (x, torch.ones(6).double()):
        yield call(aten.copysign_.Tensor, x.clone(), other)
        if dtype == torch.float32:
            yield call(aten.ldexp_.default, x.clone(), other)
            yield call(aten.ldexp.Tensor, x, other)
    for number in (2, 0.5):
        yield call(aten.copysign_.Scalar, x.clone(), number)
        yield call(aten.xlogy_.Scalar_Other, x.clone(), number)
    yield call(aten.heaviside_.default, x.clone(), x)
    yield call(aten.gcd_.default, torch.ones(5, 6, dtype=torch.int64), torch.ones(5, 6, dtype=torch.int64))
    yield call(aten.add_.Tensor, torch.ones(5, 6).to(dtype), torch.ones(5, 6, dtype=torch.float32))
    yield call(aten.add_.Tensor, torch.ones(5, 6).to(dtype), 1)
    yield call(aten.mul_.Tensor, torch.ones(5, 6).to(dtype), torch.ones(6).to(dtype))
    for name in words("add sub mul div remainder fmod floor_divide pow"):
        yield call(getattr(aten, name + "_").Scalar, torch.ones(5, 6).to(dtype), 2)
    for integers in (torch.ones(5, 6, dtype=torch.int64), torch.ones(5, 6, dtype=torch.int32)):
        for name in words("__lshift__ __rshift__ __ilshift__ __irshift__"):
            yield call(getattr(aten, name).Scalar, integers.clone(), 2)
            yield call(getattr(aten, name).Tensor, integers.clone(), integers)
        for name in words("bitwise_left_shift bitwise_right_shift"):
            yield call(getattr(aten, name).Tensor_Scalar, integers, 2)
            yield call(getattr(aten, name).Scalar_Tensor, 2, integers)
    yield call(aten.polygamma.default, 2, torch.ones(5, 5, dtype=torch.int64))
    yield call(aten.copy_.default, torch.ones(5, 6), x)
    yield call(aten.fill_.Scalar, torch.ones(5, 6), 1.0)
    yield call(aten.complex.default, torch.ones(5, 6), torch.ones(5, 6))
    yield call(aten.polar.default, torch.ones(5, 6), torch.ones(5, 6))
    yield call(aten.view_as_real.default, torch.ones(5, 6, dtype=torch.complex64))
    yield call(aten.mul.Tensor, torch.ones(5, 6, dtype=torch.complex64), torch.ones(5, 6))
    yield call(aten.mul.Tensor, torch.ones(5, 6, dtype=torch.complex64), 1j)
    yield call(aten.abs.default, torch.ones(5, 6, dtype=torch.complex64))
    yield call(aten.isinf.default, torch.ones(5, 6, dtype=torch.complex64))
    yield call(aten.isinf.default, torch.ones(6, 5, dtype=torch.complex128).mT)
    yield call(aten.linalg_vector_norm.default, torch.ones((), dtype=torch.complex64), 0)
    yield call(aten.angle.default, torch.ones(5, 6, dtype=torch.complex64))
    yield call(prims.convert_element_type.default, x, torch.float64)
    yield call(prims.fma.default, torch.ones(5, 6), torch.ones(5, 6), torch.ones(5, 6))


@family
def reductions(dtype: torch.dtype) -> Iterator[Call]:
    for x in (*layouts(dtype, 24, 40), torch.randn(4, 5, 6, 7).to(dtype), torch.randn(200, 300).to(dtype)):
        dims: tuple[list[int], ...] = ([0], [1], [-1, 0]) if x.dim() == 2 else ([0], [1], [2, 3], [0, 2], [1, 3])
        for dim in dims:
            for keep in (False, True):
                for target in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default):
                    yield call(target, x, dim, keep)
                yield call(aten.var.correction, x, dim, correction=0, keepdim=keep)
                yield call(aten.std.correction, x, dim, correction=1, keepdim=keep)
                yield call(aten.var_mean.correction, x, dim, correction=0, keepdim=keep)
                yield call(aten.linalg_vector_norm.default, x, 2, dim, keep)
                yield call(aten.logsumexp.default, x, dim, keep)
            yield call(aten.sum.dim_IntList, x, dim, dtype=torch.float32)
            yield call(aten.sum.dim_IntList, x, dim, dtype=torch.float64)
            yield call(aten.mean.dim, x, dim, dtype=torch.float32)
            yield call(aten.nansum.default, x, dim)
            for order in (0, 0.5, 1, 3, float("inf"), -float("inf")):
                yield call(aten.linalg_vector_norm.default, x, order, dim)
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
        yield from (call(aten.count_nonzero.dim_IntList, x, [d]) for d in range(x.dim()))
        yield from (call(aten.count_nonzero.default, x, d) for d in range(x.dim()))
        yield call(aten.sum.default, x, dtype=torch.float32)
        yield call(aten.mean.default, x, dtype=torch.float32)
    for x in (torch.rand(64, 50) > 0.5, torch.randint(9, (64, 50)), torch.randint(9, (64, 50)).int()):
        for target in (aten.sum.default, aten.any.default, aten.all.default, aten.prod.default, aten.max.default):
            yield call(target, x)
        for name in words("any.dim all.dim max.dim argmax.default prod.dim_int cumsum.default"):
            if name != "argmax.default" or x.dtype != torch.bool:
                yield call(attrgetter(name)(aten), x, 0)
        yield call(aten.sum.dim_IntList, x, [1])
        yield call(aten.sum.dim_IntList, x, [1], dtype=torch.float32)
        yield call(aten.mean.dim, x, [1], dtype=torch.float32)


@family
def scans_and_sorts(dtype: torch.dtype) -> Iterator[Call]:
    for x in layouts(dtype, 24, 40):
        for d in (0, 1):
            yield call(aten.cumsum.default, x, d)
            yield call(aten.cumsum.default, x, d, dtype=torch.float64)
            for name in words("cumprod logcumsumexp cummax cummin sort"):
                yield call(getattr(aten, name).default, x, d)
            yield call(aten.sort.stable, x, stable=True, dim=d, descending=True)
            yield call(aten.topk.default, x, 3, d)
            yield call(aten.flip.default, x, [d])
            yield call(aten.roll.default, x, [1], [d])
        yield call(aten.roll.default, x, [1])
        yield call(aten.diagonal_copy.default, x)
        yield call(aten.rot90.default, x)
    yield call(aten.sort.default, torch.randn(7).to(dtype))
    yield call(aten.sort.default, torch.randint(99, (4000,)))
    yield call(aten.cumsum.default, torch.ones(6, 50, dtype=torch.int64), 1, dtype=torch.int32)
    yield call(aten.cumsum.default, torch.rand(6, 50) > 0.5, 1)
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
        yield call(aten.repeat.default, x.sum().clone(), [])
        yield call(aten.repeat_interleave.self_int, x, 2, 0)
        yield call(aten.slice_scatter.default, x, torch.randn(24, 2).to(dtype), 1, 1, 3)
        yield call(aten.select_scatter.default, x, torch.randn(24).to(dtype), 1, 1)
        yield call(aten.diagonal_scatter.default, x, torch.randn(24).to(dtype))
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
        for name in words("empty_like rand_like randn_like"):
            yield call(getattr(aten, name).default, x)
        yield call(aten.bernoulli.p, x, 0.3)
        yield call(aten.native_dropout.default, x, 0.3, True)
        for kind in (dtype, torch.int64, torch.int32):
            yield call(aten.native_dropout_backward.default, torch.randn(24, 40).to(kind), x > 0, 1.4)
    for x in layouts(dtype, 80, 90):  # large enough for a transposed matrix to be copied in blocks
        yield call(aten.clone.default, x)
        yield call(aten.clone.default, x, memory_format=torch.contiguous_format)
        yield call(aten._to_copy.default, x, memory_format=torch.contiguous_format)
        for target in (torch.zeros(80, 90).to(dtype), torch.zeros(90, 80).to(dtype).t()):
            yield call(aten.copy_.default, target, x)
            yield call(aten.copy.default, target, x)
    y = torch.randn(2, 3, 8, 8).to(dtype)
    yield call(aten.select_backward.default, y, [2, 3, 4, 8, 8], 2, 1)
    yield call(aten.slice_backward.default, y, [2, 3, 8, 20], 3, 2, 18, 2)
    yield call(aten.diagonal_backward.default, torch.randn(6).to(dtype), [6, 6], 0, 0, 1)
    yield call(aten.unfold.default, y, 3, 2, 2)
    yield call(aten.unfold_backward.default, torch.randn(2, 3, 8, 4, 2).to(dtype), [2, 3, 8, 8], 3, 2, 2)
    for image in (y, y.contiguous(memory_format=torch.channels_last), y.transpose(2, 3)):
        yield call(aten.im2col.default, image, [3, 3], [1, 1], [1, 1], [1, 1])
    yield call(aten.col2im.default, torch.randn(2, 27, 64).to(dtype), [8, 8], [3, 3], [1, 1], [1, 1], [1, 1])
    yield call(aten.col2im.default, torch.randn(2, 12, 4).to(dtype), [5, 5], [2, 2], [1, 1], [0, 0], [2, 2])
    yield call(aten.pixel_shuffle.default, torch.randn(2, 12, 4, 4).to(dtype), 2)
    yield call(aten.pixel_unshuffle.default, y, 2)
    strided = torch.randn(2, 4, 8, 8).to(dtype)[:, :, ::2, ::2]
    for image in (strided.contiguous(), strided.contiguous(memory_format=torch.channels_last), strided):
        yield call(aten.channel_shuffle.default, image, 2)
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
        yield call(aten.roll.default, z, [1, 2, -1], [1, 2, 3])


# --- indexing, losses, norms, pools, products, attention, convolution, linear algebra ---


def images(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    """Return images that are contiguous, with channels last, and with images and channels swapped in memory."""
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
        yield call(aten.index_add.default, base, 1, row % 24, torch.randn(50, 40).to(dtype))
        yield call(aten.index_add.default, base[:, :15].clone(), 0, row, torch.randn(40, 15).to(dtype))
        yield call(aten.index_add.default, torch.randn(100, 50).to(dtype).mT, 0, row, torch.randn(40, 100).to(dtype))
        yield call(aten.index_copy.default, base, 0, row, torch.randn(40, 24).to(dtype))
        yield call(aten.index_fill.int_Scalar, base, 0, row, 1.0)
        yield call(aten.index_add.default, base, 0, row.repeat_interleave(2)[::2], torch.randn(40, 24).to(dtype))
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
    for num, begin in ((30, torch.tensor([0, 10, 20])), (600, torch.arange(0, 600, 6))):
        ids = torch.randint(50, (num,))
        for mode, padding in itertools.product((0, 1, 2), (-1, 3)):
            weights = None if mode else torch.rand(len(ids)).to(dtype)
            yield call(aten._embedding_bag.default, table, ids, begin, False, mode, False, weights, False, padding)
            for looked_up in (table, table[:, :1].expand(50, 240)):
                yield call(aten._embedding_bag_forward_only.default, looked_up, ids, begin, False, mode)
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
                row = logits[0] if how else logits[:, 0]
                yield call(aten.nll_loss_forward.default, row, labels[0], weight if how else None, how, -100)
        for weights in (None, torch.rand(50, 24).to(dtype)):
            for how in (0, 1):
                args = (logits, logits, None, weights, how)
                yield call(aten.binary_cross_entropy_with_logits.default, *args)
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
    scores = torch.randn(6000).to(dtype)
    for other in (torch.randint(2, (6000,), dtype=torch.uint8), torch.rand(6000).half(), torch.rand(6000).to(dtype)):
        for loss in (aten.mse_loss, aten.huber_loss, aten.smooth_l1_loss, aten.soft_margin_loss):
            yield call(loss.default, scores, other, 0)  # the result of a mean keeps the memory of all elements' losses
        if other.dtype != torch.uint8:
            yield call(aten.soft_margin_loss_backward.default, torch.ones(()).to(dtype), scores, other, 1)
    yield call(aten.soft_margin_loss_backward.default, torch.ones(()).to(dtype), scores[:300, None], scores[:300], 1)
    wide = maps.double().sigmoid()
    yield call(aten.binary_cross_entropy_backward.default, torch.ones(()).double(), wide, wide, None, 1)
    yield call(aten.binary_cross_entropy_with_logits.default, wide, maps, None, None, 1)
    yield call(aten.soft_margin_loss_backward.default, torch.ones(()).to(dtype), maps, maps, 1)
    yield call(aten.multi_margin_loss.default, torch.randn(50, 24).to(torch.float32), labels)
    yield call(aten.multi_margin_loss_backward.default, torch.ones(()), torch.randn(50, 24), labels, 1, 1, None, 1)
    spoken = torch.randn(20, 2, 8).log_softmax(-1)
    targets, lengths, sizes = torch.randint(1, 8, (2, 5)), torch.tensor([20, 18]), torch.tensor([5, 4])
    yield call(aten._ctc_loss.default, spoken, targets, lengths.tolist(), sizes.tolist())
    for long, short in ((lengths, sizes), (lengths.int(), sizes.int())):
        loss, alpha = aten._ctc_loss.Tensor(spoken, targets, long, short)
        yield call(aten._ctc_loss.Tensor, spoken, targets, long, short)
        args = (torch.ones(2), spoken, targets, long, short, loss, alpha, 0)
        yield call(aten._ctc_loss_backward.Tensor, *args)
    pairs = (((2, 1, 30, 6), (3, 40, 6)), ((5, 6), (4, 7, 6)), ((4, 5, 6), (4, 7, 6)))
    for (first, second), norm in itertools.product(pairs, (1.0, 2.0)):
        left, right = torch.rand(first), torch.rand(second)
        distances = aten._cdist_forward.default(left, right, norm, None)
        yield call(aten._cdist_forward.default, left, right, norm, None)
        yield call(aten._cdist_backward.default, distances, left, right, norm, distances)
    yield call(aten._cdist_backward.default, distances.mT.contiguous().mT, left, right, norm, distances)
    yield call(aten._euclidean_dist.default, left, right)
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
                backward, saved = aten.native_layer_norm_backward.default, ([columns], mean, rstd, weight)
                for wanted in ([True, True, True], [True, False, False], [True, True, False]):
                    yield call(backward, y, x, *saved, bias, wanted)
                yield call(backward, x, y, *saved, None, [True, True, False])
            strided = torch.zeros(2 * columns).to(weight_dtype)[::2]
            yield call(backward, x, x, [columns], mean, rstd, strided, strided, [True, True, True])
    for dtypes in {(dtype, dtype), (dtype, torch.float32)}:
        weight, bias = torch.ones(32).to(dtypes[1]), torch.zeros(32).to(dtypes[1])
        running = (torch.zeros(32).to(dtypes[1]), torch.ones(32).to(dtypes[1]))
        grad = torch.randn(4, 32, 9, 9).to(dtype)
        for x in images(dtype, 4, 32, 9, 9)[:2]:
            _, mean, rstd = aten.native_group_norm.default(x, weight, bias, 4, 32, 81, 4, 1e-5)
            yield call(aten.native_group_norm.default, x, weight, bias, 4, 32, 81, 4, 1e-5)
            yield call(aten.native_group_norm.default, x, None, None, 4, 32, 81, 4, 1e-5)
            is_last = x.is_contiguous(memory_format=torch.channels_last)
            y = grad.contiguous(memory_format=torch.channels_last) if is_last else grad
            args = (y, x, mean, rstd, weight, 4, 32, 81, 4, [True, True, True])
            yield call(aten.native_group_norm_backward.default, *args)
        for x in images(dtype, 4, 32, 9, 9):
            args = (x, weight, bias, *running, True, 0.1, 1e-5)
            _, mean, rstd, *_ = aten._native_batch_norm_legit_functional.default(*args)
            yield call(aten._native_batch_norm_legit_functional.default, *args)
            yield call(aten._native_batch_norm_legit_no_training.default, x, weight, bias, *running, 0.1, 1e-5)
            yield call(aten._native_batch_norm_legit.no_stats, x, weight, bias, True, 0.1, 1e-5)
            if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last):
                yield call(aten._batch_norm_with_update_functional.default, x, weight, bias, *running, 0.1, 1e-5)
            for y in (grad, grad.to(memory_format=torch.channels_last)):
                for training in (True, False):
                    args = (y, x, weight, *running, mean, rstd, training, 1e-5, [True, True, True])
                    yield call(aten.native_batch_norm_backward.default, *args)
    for size in ((4, 8), (3, 2, 4), (1, 2, 3), (3, 8, 4, 5)):
        x, grad, row = (
            torch.randn(*size, 2).to(dtype)[..., 0],
            torch.randn(size).to(dtype),
            torch.ones(size[1]).to(dtype),
        )
        for weight, bias in ((row, row), (None, None)):
            for training in (True, False):
                for y in (x, grad):
                    yield call(aten.native_batch_norm.default, y, weight, bias, row, row, training, 0.1, 1e-5)
                    args = (grad, y, weight, row, row, row, row, training, 1e-5, [True, True, True])
                    yield call(aten.native_batch_norm_backward.default, *args)
    for x in layouts(dtype, 24, 40):
        yield call(aten._fused_rms_norm.default, x, [40], torch.ones(40).to(dtype), 1e-5)
    for x in (torch.randn(1, 6000), torch.randn(100, 60).t()):
        yield call(aten._fused_rms_norm.default, x.to(dtype), [x.shape[1]], torch.ones(x.shape[1]).to(dtype), 1e-5)


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
        of_grown = (torch.randn(2, 8, 24, 24).to(dtype), [24, 24], [2, 8, 12, 12])
        yield call(aten.upsample_nearest2d.default, x, [24, 24])
        yield call(aten.upsample_nearest2d_backward.default, *of_grown)
        yield call(aten.upsample_bilinear2d.default, x, [24, 24], False)
        yield call(aten.upsample_bilinear2d_backward.default, *of_grown, False)
        wide = torch.randn(2, 16, 24, 24).to(dtype).to(memory_format=torch.channels_last)
        for given in (wide, wide[:, :8]):  # a part: of one of several images that were joined
            to = ([24, 24], [2, given.shape[1], 12, 12])
            yield call(aten.upsample_nearest2d_backward.default, given, *to)
            yield call(aten.upsample_bilinear2d_backward.default, given, *to, False)
            yield call(aten.upsample_bicubic2d_backward.default, given, *to, False)
            if dtype == torch.float32:
                yield call(aten._upsample_bilinear2d_aa_backward.default, given, *to, False)
        yield call(aten.upsample_bicubic2d.default, x, [24, 24], False)
        yield call(aten.upsample_bicubic2d_backward.default, *of_grown, False)
        if dtype == torch.float32:
            yield call(aten._upsample_bilinear2d_aa.default, x, [24, 24], False)
            yield call(aten._upsample_bicubic2d_aa.default, x, [6, 6], False)
            yield call(aten._upsample_bilinear2d_aa_backward.default, *of_grown, False)
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
    for dims, given, shape in ((1, line, (2, 8, 14)), (3, volume, (2, 4, 8, 8, 8))):
        for op in (f"reflection_pad{dims}d", f"replication_pad{dims}d"):
            yield call(getattr(aten, op).default, given, [1, 1] * dims)
            yield call(getattr(aten, op + "_backward").default, torch.randn(shape).to(dtype), given, [1, 1] * dims)
    for op, rest in (("nearest", ()), ("linear", (False,))):
        yield call(getattr(aten, f"upsample_{op}1d").default, line, [24], *rest)
        grad = torch.randn(2, 8, 24).to(dtype)
        yield call(getattr(aten, f"upsample_{op}1d_backward").default, grad, [24], [2, 8, 12], *rest)
    yield call(aten.upsample_nearest3d.default, volume, [12, 12, 12])
    yield call(aten.upsample_trilinear3d.default, volume, [12, 12, 12], False)
    cubes, at = aten.max_pool3d_with_indices.default(volume, [2] * 3, [2] * 3)
    yield call(aten.max_pool3d_with_indices.default, volume, [2] * 3, [2] * 3)
    yield call(
        aten.max_pool3d_with_indices_backward.default, cubes, volume, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, at
    )
    if dtype == torch.float32:
        yield call(aten.avg_pool3d.default, volume, [2] * 3)
        yield call(aten.avg_pool3d_backward.default, cubes, volume, [2] * 3, [2] * 3, [0] * 3, False, True, None)
    yield call(aten._adaptive_avg_pool3d.default, volume, [2] * 3)
    yield call(aten._adaptive_avg_pool3d_backward.default, torch.randn(2, 4, 2, 2, 2).to(dtype), volume)


@family
def products(dtype: torch.dtype) -> Iterator[Call]:
    for rows, inner, columns in ((3, 5, 4), (32, 32, 96), (300, 64, 500)):
        for a, b in itertools.product(layouts(dtype, rows, inner), layouts(dtype, inner, columns)):
            yield call(aten.mm.default, a, b)
            yield call(aten.addmm.default, torch.randn(columns).to(dtype), a, b)
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
def complex_products(dtype: torch.dtype) -> Iterator[Call]:
    """Yield products of matrices that are conjugated, or transposed, or both, as gradients have them."""
    if dtype != torch.float32:
        return

    def numbers(*shape: int) -> list[Tensor]:
        x, other = torch.randn(shape, dtype=torch.complex64), torch.randn(*shape[:-2], shape[-1], shape[-2])
        y = other.to(torch.complex64)
        return [x, x.conj(), y.mT, y.mH]

    for rows in (3, 12):
        for left, right in itertools.product(numbers(rows, 7), numbers(7, 9)):
            yield call(aten.mm.default, left, right)
            yield call(aten.addmm.default, torch.randn(9, dtype=torch.complex64), left, right)
        for left, right in itertools.product(numbers(2, rows, 7), numbers(2, 7, 9)):
            yield call(aten.bmm.default, left, right)
            yield call(aten.baddbmm.default, torch.randn(2, rows, 9, dtype=torch.complex64), left, right)


@family
def marked_operands(dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls with operands that have a conjugate or a negative bit, which most operators resolve by a copy."""
    if dtype != torch.float32:
        return
    x = torch.randn(24, 40, dtype=torch.complex64)
    for marked in (x.conj(), torch.randn(40, 24, dtype=torch.complex64).mH, torch._neg_view(x), x.conj().imag):
        yield call(aten.exp.default, marked)
        yield call(aten.mul.Tensor, marked, x)
        yield call(aten.sum.dim_IntList, marked, [0])
        yield call(aten.cat.default, [x, marked])
        yield call(aten.clone.default, marked)
        if marked.is_complex():
            yield call(aten._fft_c2c.default, marked, [1], 1, False)


@family
def linear_algebra(dtype: torch.dtype) -> Iterator[Call]:
    """Yield decompositions of square, high and wide matrices that lie by rows, by columns and with gaps."""
    if dtype != torch.float32:
        return
    by_columns, with_gaps = (lambda x: x.mT.contiguous().mT), (lambda x: torch.stack([x, x], -1)[..., 0])
    shapes = ((8, 8), (64, 64), (300, 300), (3, 24, 24), (4, 60, 20), (4, 20, 60), (90, 64))
    for kind, shape in itertools.product((torch.float32, torch.complex64), shapes):
        x, right = torch.randn(shape, dtype=kind), torch.randn(shape, dtype=kind)
        reflectors, scales = aten.geqrf.default(x)
        for target in (aten.geqrf, aten.linalg_lu, aten._linalg_svd):
            yield call(target.default, x)
        yield call(aten.linalg_pinv.atol_rtol_tensor, x[..., :20])
        yield from (call(aten.linalg_qr.default, x, mode) for mode in ("reduced", "complete", "r"))
        yield from (
            call(aten.linalg_lstsq.default, x, right, driver=how) for how in ("gels", "gelsy", "gelsd", "gelss")
        )
        factors, pivots, _ = aten.linalg_lu_factor_ex.default(x)
        yield call(aten.linalg_lu_factor_ex.default, x)
        if shape[-1] <= shape[-2]:
            yield call(aten.linalg_householder_product.default, reflectors, scales)
        for of in (Tensor.contiguous, by_columns, with_gaps):
            yield call(aten.lu_unpack.default, of(factors), pivots)
            yield call(aten.ormqr.default, of(reflectors), scales, torch.randn(*shape[:-1], 9, dtype=kind))
            if shape[-1] != shape[-2]:
                continue
            definite, other = of(x @ x.mH + shape[-1] * torch.eye(shape[-1])), torch.randn(shape, dtype=kind)
            for target in words(
                """
                linalg_cholesky_ex cholesky cholesky_inverse linalg_inv_ex _linalg_det _linalg_slogdet _linalg_eigh
                linalg_ldl_factor_ex linalg_eig linalg_eigvals _linalg_eigvals linalg_matrix_exp
                """
            ):
                is_slow = "exp" in target or "eig" in target
                if f"aten::{target}" not in GONE and not (is_slow and shape[-1] >= 100):
                    yield call(getattr(aten, target).default, definite / (100 if "exp" in target else 1))
            yield call(aten._linalg_eigh.default, definite, "L", False)
            yield call(aten._linalg_solve_ex.default, definite, other)
            yield call(aten.linalg_solve_triangular.default, definite, other, upper=True)
            yield call(aten.triangular_solve.default, other, definite)
            yield call(aten.linalg_lu_solve.default, of(factors), pivots, other)
            yield call(aten.cholesky_solve.default, other, definite)
    yield call(aten.linalg_cross.default, torch.randn(4, 3), torch.randn(4, 3))
    for shape in ((), (1,), (5,), (2, 3)):
        yield call(aten._linalg_check_errors.default, torch.zeros(shape, dtype=torch.int32), "inv", is_matrix=not shape)


@family
def complex_numbers(dtype: torch.dtype) -> Iterator[Call]:
    """Yield Fourier transforms, and operators that take real and imaginary parts one by one."""
    if dtype != torch.float32:
        return
    image, spectrum = torch.randn(3, 4, 10, 12), torch.randn(3, 4, 10, 7, dtype=torch.complex64)
    for real, numbers in ((image, spectrum), (image.transpose(1, 3), spectrum.transpose(1, 2))):
        for dims in ([3], [2, 3], [2], [1, 3], [3, 0, 2]):
            yield call(aten._fft_r2c.default, real, dims, 0, True)
            yield call(aten._fft_r2c.default, real, dims, 0, False)
            yield call(aten._fft_c2c.default, numbers, dims, 0, True)
            yield call(aten._fft_c2r.default, numbers, dims, 2, 2 * (numbers.shape[dims[-1]] - 1))
    yield call(aten._fft_c2r.default, torch.randn(80, 80, dtype=torch.complex64).t(), [1], 2, 158)
    yield call(aten._conj.default, torch.randn(4, 16, dtype=torch.complex64))
    yield call(aten._conj_physical.default, torch.randn(4, 16, dtype=torch.complex64))
    for kind in (torch.complex64, torch.complex128, torch.float64):
        for x in (
            torch.randn(6, 10, dtype=kind),
            torch.randn(10, 6, dtype=kind).t(),
            torch.randn(200, 300, dtype=kind),
        ):
            for name in words("var std var_mean std_mean"):
                target = getattr(aten, name).correction
                yield call(target, x)
                yield call(target, x, [0], correction=0, keepdim=True)
                yield call(target, x, [0, 1])
            for order in (0.5, 2, float("inf"), -float("inf")):
                yield call(aten.linalg_vector_norm.default, x, order, [1])
                yield call(aten.norm.Scalar, x, order)
                yield call(aten.dist.default, x, x + 1, order)
                yield call(aten.renorm_.default, x[:, :1].clone(), abs(order), 0, 1.0)
            if kind.is_complex:
                yield call(aten.linalg_vector_norm.default, x, 2, dtype=torch.complex128)


@family
def random_numbers(dtype: torch.dtype) -> Iterator[Call]:
    yield call(aten.normal.float_float, 0.0, 1.0, [64, 32], dtype=dtype)
    for x in layouts(dtype, 80, 90):
        positive = x.abs() if x.numel() == x.untyped_storage().nbytes() // x.itemsize else x * 0 + 1
        for target in (aten.normal_functional, aten.uniform, aten.random, aten.exponential):
            yield call(target.default, x)
        yield call(aten.bernoulli.p, x, 0.5)
        yield call(aten.poisson.default, positive)
        yield call(aten.normal.Tensor_float, x)
        yield call(aten.normal.float_Tensor, 0.0, positive)
        yield call(aten.normal.Tensor_Tensor, x[:1], positive)
        for training, rrelu in itertools.product(
            (True, False), (aten.rrelu_with_noise, aten.rrelu_with_noise_functional)
        ):
            yield call(rrelu.default, x, torch.rand_like(x), 0.1, 0.3, training)
        yield call(aten.rrelu_with_noise_backward.default, x, x, torch.rand_like(x), 0.1, 0.3, True, False)
        if dtype == torch.float32:
            yield call(aten._standard_gamma.default, positive)
            yield call(aten._standard_gamma_grad.default, positive + 0.1, positive + 0.1)
            yield call(aten._dirichlet_grad.default, positive + 0.1, positive + 0.1, positive + 0.1)
            yield call(aten.binomial.default, positive.round(), positive.sigmoid())
    means = torch.randn(6000).to(dtype)
    yield call(aten.normal.Tensor_Tensor, means, torch.rand(6000).to(torch.float16))
    for rows in (torch.rand(8, 300).to(dtype), torch.rand(300, 8).to(dtype).t(), torch.rand(5000).to(dtype)):
        yield from (
            call(aten.multinomial.default, rows, num, replacement) for num, replacement in ((1, False), (3, True))
        )
    yield call(aten.multinomial.default, torch.rand(4, 50), 5)


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
    yield call(aten._assert_async.default, true)
    yield call(aten._assert_async.msg, true, "no")
    yield call(aten._assert_scalar.default, True, "no")
    yield call(aten._functional_assert_async.msg, true, "no", torch.ones(()))


@family
def bilinear_forms(dtype: torch.dtype) -> Iterator[Call]:
    left, right, out = (torch.randn(80, size).to(dtype) for size in (48, 40, 6))
    weight = torch.randn(6, 48, 40).to(dtype)
    yield call(aten._trilinear.default, left, weight, right, [1, 3], [0], [1, 2], [2, 3])
    yield call(aten._trilinear.default, out, weight, right, [2, 3], [0], [1, 2], [1, 3])  # the gradient of `left`
    yield call(aten._trilinear.default, left, out, right, [1, 3], [2, 3], [1, 2], [0])
    yield call(aten._trilinear.default, left, weight, out, [1, 3], [0], [2, 3], [1, 2])


@family
def rare(dtype: torch.dtype) -> Iterator[Call]:
    """Yield calls of operators that are only bounded; samples of PyTorch's own have more (`bench/conformance.py`)."""
    for d, x in enumerate((torch.randn(6000, 1).to(dtype), torch.randn(6000, 1).to(dtype).t())):
        yield call(aten.renorm.default, x, 2, d, 1.0)
    for x in layouts(dtype, 80, 90):
        for d in (0, 1):
            yield call(aten.median.dim, x, d)
            yield call(aten.nanmedian.dim, x, d)
            yield call(aten.kthvalue.default, x, 3, d)
            yield call(aten.renorm.default, x, 2, d, 1.0)
            yield call(aten.renorm_.default, x.clone(), float("inf"), d, 1.0)
        yield call(aten.median.default, x)
        yield call(aten.narrow_copy.default, x, 0, 3, 20)
        yield call(aten.dist.default, x.to(torch.complex64), x.double(), 2.0)
        yield call(aten.dist.default, x, torch.rand(90).to(dtype), 1.0)
        yield call(aten.allclose.default, x, x[:1], equal_nan=True)
        yield from (call(target.default, abs(x.clone()) + 5, 3) for target in (aten.mvlgamma, aten.mvlgamma_))
        yield call(aten.bucketize.Tensor, x, torch.arange(20)[::2])
        yield call(aten.searchsorted.Tensor, torch.arange(90.0).expand(80, 90), x)
        yield call(aten.logcumsumexp.default, x, 1)
        yield call(aten.block_diag.default, [x, x.t()])
        for lengths in (torch.full((20,), 4), torch.full((20, 2), 4)[:, 0]):
            yield call(aten.segment_reduce.default, x, "max", lengths=lengths)
        offsets = torch.arange(0, 81, 4)
        reduced = aten.segment_reduce.default(x, "sum", offsets=offsets)
        yield call(aten._segment_reduce_backward.default, reduced, reduced, x, "sum", offsets=offsets)
        for bins in (1, 16, 600):
            if dtype == torch.float32:
                yield call(aten.histc.default, x, bins)
                yield call(aten.histc.default, x, bins, 0.0, 1.0)
                yield call(aten.histogram.bin_ct, x, bins, density=True)
                yield call(aten.histogram.bins_tensor, x, torch.linspace(0, 1, bins + 1))
                yield call(aten._histogramdd_bin_edges.default, x[:, :2], [bins, 2])
                yield call(aten._histogramdd_from_bin_cts.default, x[:, :2], [bins, 2], density=True)
                edges = [torch.linspace(0, 1, bins + 1), torch.linspace(0, 1, 3)]
                yield call(aten._histogramdd_from_bin_tensors.default, x[:, :2], edges)
        for target in (aten.tril, aten.triu, aten.tril_, aten.triu_):
            clone = x.clone(memory_format=torch.preserve_format)
            yield call(target.default, clone)
            yield call(target.default, torch.stack([clone] * 3)[:, :40])
            yield call(target.default, torch.stack([clone] * 3, 1).unflatten(0, (4, 20)).transpose(1, 2))
        for chosen in (x, x * (x > 0), x * 0):
            yield call(aten.masked_select.default, chosen, chosen != 0)
            yield call(aten.masked_select.default, chosen, chosen[:1] != 0)
            yield call(aten.nonzero_static.default, chosen, size=30)
            yield call(aten._unique.default, chosen, True, True)
            yield call(aten._unique2.default, chosen, True, True, True)
            for d in (None, 0, 1):
                yield call(aten.unique_consecutive.default, chosen, True, True, d)
                if d is not None:
                    yield call(aten.unique_dim.default, chosen, d, True, True, True)
    for number in (torch.arange(100), torch.arange(200)[::2]):
        for weight in (None, torch.rand(200).to(dtype)[::2], number):
            yield call(aten.bincount.default, number, weight, 120)
    for sequence, value in itertools.product((torch.arange(20).to(dtype)[::2], torch.arange(10)), (3, 3.5)):
        yield call(aten.searchsorted.Scalar, sequence, value, sorter=torch.arange(10))
        yield call(aten.bucketize.Scalar, value, sequence)
    for num_tested in (5, 20, 90):
        yield call(aten.isin.Tensor_Tensor, torch.arange(50), torch.arange(num_tested))
    for window, length in itertools.product(words("hann hamming blackman bartlett"), (64, 4001)):
        yield call(getattr(aten, f"{window}_window").default, length)
        yield call(getattr(aten, f"{window}_window").periodic, length, False)
    for sizes in ([4, 3, 20, 24], [1, 3, 64, 64], [2, 3, 8, 10, 12]):
        theta = torch.randn(sizes[0], len(sizes) - 2, len(sizes) - 1).to(dtype)
        yield call(aten.affine_grid_generator.default, theta, sizes, False)
    yield call(aten._efficientzerotensor.default, [24, 40], dtype=dtype)
    for target in (aten.squeeze_.default, aten.t_.default, aten.unsqueeze_.default):
        yield call(target, torch.rand(24, 40).to(dtype), *([0] if target is aten.unsqueeze_.default else []))
    for kind, exponents in itertools.product(
        (torch.int64, torch.bfloat16, torch.float64), (torch.int64, torch.float64)
    ):
        yield call(aten.ldexp.Tensor, torch.ones(6, 7).to(kind), torch.ones(7).to(exponents))
    volume, samples = torch.rand(2, 3, 10, 10, 10).to(dtype), torch.rand(2, 3, 3).to(dtype)
    for x in (volume, volume.mT):
        yield call(aten.fractional_max_pool3d.default, x, [2] * 3, [5] * 3, samples)
        pooled, at = aten.fractional_max_pool3d.default(x, [2] * 3, [5] * 3, samples)
        for grad in (pooled, pooled.mT):
            yield call(aten.fractional_max_pool3d_backward.default, grad, x, [2] * 3, [5] * 3, at)


@family
def indices_of_32_bits(dtype: torch.dtype) -> Iterator[Call]:
    base, source = torch.randn(50, 24).to(dtype), torch.randn(60, 30).to(dtype)
    for kind in (torch.int32, torch.int64):
        rows, row = torch.randint(24, (40, 20)).to(kind), torch.randint(24, (20,)).to(kind)
        yield call(aten.gather.default, base, 1, rows)
        yield call(aten.scatter.src, base, 1, rows, source)
        yield call(aten.scatter.value, base, 1, rows, 1.0)
        yield call(aten.scatter.reduce, base, 1, rows, source, reduce="add")
        yield call(aten.scatter_add.default, base, 1, rows, source)
        yield call(aten.scatter_add_.default, base.clone(), 1, rows, source)
        for reduce in ("sum", "mean", "amax"):
            yield call(aten.scatter_reduce.two, base, 1, rows, source, reduce)
        for dim, added in ((0, torch.randn(20, 24)), (1, torch.randn(50, 20))):
            yield call(aten.index_add.default, base, dim, row, added.to(dtype))
            for how, with_self in itertools.product(("mean", "prod"), (False, True)):
                yield call(aten.index_reduce.default, base, dim, row, added.to(dtype), how, include_self=with_self)
        table, ids = torch.randn(30, 6).to(dtype), torch.randint(30, (40,)).to(kind)
        for begin in (torch.arange(0, 40, 5).int(), torch.arange(0, 40, 5)):
            out, owner, *_ = aten._embedding_bag.default(table, ids, begin, False, 0, False, torch.rand(40).to(dtype))
            yield call(aten._embedding_bag_per_sample_weights_backward.default, out, table, ids, begin, owner, 0)
            yield call(aten._embedding_bag.default, table, ids, begin, False, 1)
    yield call(aten.embedding_renorm.default, table, ids[:, None].expand(40, 2), 1.0, 2.0)
    yield call(aten.embedding_renorm_.default, table, ids, 1.0, 2.0)
