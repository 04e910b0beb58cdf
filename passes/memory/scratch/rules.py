"""Count the scratch bytes of calls, from metadata: a function for each kind of operator.

`chunkc.passes.memory.scratch.operators` says which operators they are for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from chunkc.passes.memory.scratch.convolution import (
    Convolution,
    convolution_backward_nbytes,
    convolution_nbytes,
    read_convolution,
)
from chunkc.passes.memory.scratch.copies import contiguous_copy_nbytes, copy_block_nbytes, nbytes_of
from chunkc.passes.memory.scratch.iterator import common_dtype, number_dtype, number_nbytes, numbers_in
from chunkc.passes.memory.scratch.products import (
    attention_backward_nbytes,
    attention_nbytes,
    conjugate_copy_nbytes,
    gemm_nbytes,
    operand_copy_nbytes,
    uses_onednn,
)
from chunkc.torch_private.dispatcher import has_kernel

SCALAR_NBYTES = 32
"""A Python number becomes a 0-dim tensor (8 bytes, 16 if complex), which is cast twice at most."""


@dataclass(frozen=True)
class Call:
    """A call of an operator: arguments by name, results (tensors only), and where it runs.

    Attributes:
        num_threads: how many it may use on the CPU.
    """

    target: torch._ops.OpOverload
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...]
    num_threads: int = 1
    on_cuda: bool = False

    @property
    def name(self) -> str:
        return self.target._schema.name.removeprefix("aten::")

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors among the arguments, also those in lists."""
        return tensors_in(list(self.arguments.values()))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


Rule = Callable[[Call], int | list[int]]
"""Bytes inside of a call, beyond its results; of a CUDA device's, those of each tensor."""


def bound_call(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: object, **where: Any
) -> Call:
    """Make a `Call`, with the schema's defaults for arguments that are not given."""
    arguments: dict[str, Any] = {}
    for position, parameter in enumerate(target._schema.arguments):
        if position < len(args) and not parameter.kwarg_only:
            arguments[parameter.name] = args[position]
        else:
            arguments[parameter.name] = kwargs.get(parameter.name, parameter.default_value)
    return Call(target, arguments, tensors_in(outputs), **where)


def tensors_in(values: object) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


_OVERLOADS = """
add.Scalar sub.Scalar mul.Scalar div.Scalar div.Scalar_mode rsub.Scalar eq.Scalar ne.Scalar lt.Scalar le.Scalar
gt.Scalar ge.Scalar fmod.Scalar remainder.Scalar remainder.Scalar_Tensor floor_divide.Scalar pow.Scalar copysign.Scalar
xlogy.Scalar_Self xlogy.Scalar_Other bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar bitwise_and.Scalar_Tensor
bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar
bitwise_left_shift.Scalar_Tensor bitwise_right_shift.Scalar_Tensor special_zeta.other_scalar __lshift__.Scalar
__rshift__.Scalar __ilshift__.Scalar __irshift__.Scalar
"""
_WRAPS_NUMBERS = frozenset(_OVERLOADS.split())
"""Overloads that take a Python number where the operator computes with tensors, and make a tensor of it."""


def numbers_nbytes(call: Call, common: torch.dtype) -> int:
    """Count the bytes of the 0-dim tensors that Python numbers become, each cast to the common dtype."""
    name = call.name if call.name.endswith("__") else call.name.removesuffix("_")  # `mul_` makes a tensor as `mul` does
    wraps = f"{name}.{call.target._overloadname}" in _WRAPS_NUMBERS and call.name != "pow_"
    nbytes = 0
    for parameter in call.target._schema.arguments:
        found = numbers_in([call[parameter.name]])
        if not found or parameter.name in ("alpha", "beta"):
            continue  # factors stay inside the kernel
        (value,) = found
        kind = str(parameter.type)
        if "Tensor" in kind or (wraps and ("number" in kind or "Scalar" in kind)):
            nbytes += number_nbytes(value) + (common.itemsize if number_dtype(value) != common else 0)
    return nbytes


def _common_dtype(call: Call, operands: Sequence[Tensor]) -> torch.dtype:
    numbers = [value for name, value in call.arguments.items() if name not in ("alpha", "beta")]
    return common_dtype(operands, numbers_in(numbers), call.outputs)


def _casts(call: Call, operands: Sequence[Tensor]) -> int:
    common = _common_dtype(call, operands)
    inputs = sum(nbytes_of(t, common.itemsize) for t in operands if t.dtype != common)
    return inputs + sum(nbytes_of(t, common.itemsize) for t in call.outputs if t.dtype not in (common, torch.bool))


def is_view(target: torch._ops.OpOverload) -> bool:
    """Whether all that an operator returns is a view of its arguments, as its schema says."""
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def resolved_nbytes(target: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[int]:
    """List the copies of operands with a conjugate or negative bit that an operator gets which does not know the bit.

    Source: ATen's `MathBitsFallback.h`.
    """
    return [
        nbytes_of(tensor)
        for tensor in tree_leaves((args, kwargs))
        if isinstance(tensor, Tensor)
        and (
            (tensor.is_conj() and not has_kernel(target, "Conjugate"))
            or (tensor.is_neg() and not has_kernel(target, "Negative"))
        )
    ]


@cache
def is_elementwise(target: torch._ops.OpOverload) -> bool:
    """Whether torch tags an operator as elementwise, or the one that does the same out of place."""
    if torch.Tag.pointwise in target.tags:
        return True
    namespace, _, name = target._schema.name.partition("::")
    name = f"__{name[3:]}" if name.startswith("__i") and name.endswith("__") else name.removesuffix("_")
    packet = getattr(getattr(torch.ops, namespace), name, None) if target._schema.is_mutable else None
    found = getattr(packet, target._overloadname or "default", None)
    return isinstance(found, torch._ops.OpOverload) and torch.Tag.pointwise in found.tags


def nothing(call: Call) -> int:
    return 0


def contiguous(call: Call) -> list[int]:
    """List copies of all operands that are not contiguous, for kernels that read contiguous memory."""
    return copies(call, *call.tensors)


def copies(call: Call, *tensors: Tensor | None) -> list[int]:
    """List contiguous copies of tensors that are not contiguous; on the CPU, also the block for transposing one."""
    if call.on_cuda:
        return [nbytes_of(tensor) for tensor in tensors if tensor is not None and not tensor.is_contiguous()]
    return [contiguous_copy_nbytes(*tensors)]


def contiguous_result(call: Call) -> int:
    """Count what copying the operand takes: the result is its contiguous copy."""
    return max(map(copy_block_nbytes, call.tensors))


def operands(call: Call) -> list[int]:
    """List the operands once more: sums of all ranks, of which the result is a part."""
    return list(map(nbytes_of, call.tensors))


def results(call: Call) -> list[int]:
    """List the results once more: what Gloo gathers into, a product before its sum."""
    return list(map(nbytes_of, call.outputs))


def dense_results(call: Call) -> dict[int, int]:
    """Correct results' bytes: they are dense, though fake tensors have the strides of an argument."""
    return {position: nbytes_of(result) for position, result in enumerate(call.outputs)}


def pointwise(call: Call) -> int:
    """Count a cast of each operand, and of the output, that is not in the common dtype; and of numbers."""
    return _casts(call, call.tensors) + numbers_nbytes(call, _common_dtype(call, call.tensors))


def select(call: Call) -> int:
    """Count `where`: as elementwise, but the condition is not cast."""
    values = [t for t in call.tensors if t is not call["condition"]]
    return _casts(call, values) + numbers_nbytes(call, _common_dtype(call, values))


def cast_nbytes(source: Tensor, dtype: torch.dtype) -> int:
    """Count a copy in `dtype`, if the tensor has another."""
    return nbytes_of(source, dtype.itemsize) if source.dtype != dtype else 0


def cast(call: Call) -> int:
    """Count the operand's cast to the result's dtype."""
    return cast_nbytes(call.tensors[0], call.outputs[0].dtype)


def number_in(dtype: torch.dtype) -> int:
    """Count a floating number that becomes a tensor, and its cast."""
    return 8 + (dtype.itemsize if dtype != torch.float64 else 0)


def scaled(call: Call) -> int:
    """Count `deg2rad`, `rad2deg`: a cast, and the number that multiplies it."""
    return cast(call) + number_in(call.outputs[0].dtype)


def triangle(call: Call) -> int:
    """Bound `tril`, `triu`: a copy of matrices that are not contiguous; in place, two."""
    source, in_place = call["self"], call.target._schema.is_mutable
    if source.is_contiguous() and not in_place:
        return 0
    usual = source.stride() == torch.empty(source.shape, device="meta").stride()
    return 0 if usual else nbytes_of(source) * (2 if in_place else 1)


def log_gamma(call: Call) -> list[int]:
    """Bound `mvlgamma`: the operands of `p` terms, the numbers in them, their sum and the operand's cast."""
    result, terms = call.outputs[0], call["p"]
    return [terms * nbytes_of(result), terms * result.itemsize + SCALAR_NBYTES, nbytes_of(result)]


def power(call: Call) -> list[int]:
    """Bound `ldexp`: a power of two for every exponent, with its base; of several dtypes, or of integers, casts."""
    given, width = (*call.tensors, *call.outputs), max(4, *(tensor.itemsize for tensor in call.tensors))
    is_cast = any(tensor.dtype != given[0].dtype for tensor in given)
    casts = [3 * nbytes_of(call.outputs[0], width)] if is_cast else []
    return [nbytes_of(call["other"], width), *casts, 2 * SCALAR_NBYTES]


def is_finite(call: Call) -> list[int]:
    """List magnitudes, the number that they are compared with, masks of complex numbers, and of `isfinite` two more.

    On CUDA the number stays inside the kernel (`TensorCompare.cpp`).
    """
    source = call["self"]
    if not (source.is_complex() or source.is_floating_point()):
        return []
    num_masks = int(source.is_complex()) + (2 if call.name == "isfinite" else 0)
    magnitudes = [nbytes_of(source) if call.on_cuda or not source.is_complex() else nbytes_of(source) // 2]
    number = [] if call.on_cuda else [number_in(source.dtype.to_real())]
    return [*magnitudes, *number, *(num_masks * [source.numel()])]


def gelu_backward(call: Call) -> int:
    """Count copies into the layout of a contiguous input, for oneDNN; else casts."""
    source = call["self"]
    if not source.is_contiguous():
        return _casts(call, call.tensors)
    return sum(nbytes_of(t) for t in (call["grad_output"], *call.outputs) if not t.is_contiguous())


def concatenation(call: Call) -> int:
    """Count a copy, one at a time, of each tensor that is not in the common dtype."""
    dtype = call.outputs[0].dtype
    return max((nbytes_of(t) for t in call.tensors if t.dtype != dtype), default=0)


def copy(call: Call) -> int:
    """Count the block of a transposed matrix that is copied row by row; or a number, which becomes a tensor first.

    Tracing puts a number in the place of a 0-dim tensor.
    """
    if not call.tensors:
        return sum(map(number_nbytes, numbers_in([call["self"]])))
    source = call.tensors[-1]
    if source.layout != torch.strided:  # parts are copied into the result's, and there are no strides to ask for
        return 0
    in_rows = all(out.dtype == source.dtype and out.is_contiguous() for out in call.outputs)
    return copy_block_nbytes(source) if in_rows else 0


def sort(call: Call) -> int:
    """Count the indices of one row at a time."""
    source = call["self"]
    return 8 * source.shape[call["dim"]] if source.dim() else 0


def dropout_backward(call: Call) -> int:
    """Count the mask in the gradient's dtype, the number that multiplies it, and the cast of an integer gradient."""
    gradient, dtype = call["grad_output"], call.outputs[0].dtype
    return nbytes_of(call["mask"], gradient.itemsize) + number_in(dtype) + cast_nbytes(gradient, dtype)


def dropout(call: Call) -> int:
    """Count the mask in the operand's dtype; or, before that, the number by which it is scaled."""
    return max(nbytes_of(call["input"]), 8 + call["input"].itemsize)


def matrix_product(call: Call) -> int:
    """Count copies of operands that the library cannot read in place, and oneDNN's packing of low precision."""
    arguments = call.arguments
    left = next(arguments[name] for name in ("mat1", "batch1", "mat", "self") if name in arguments)
    right = next(arguments[name] for name in ("mat2", "batch2", "vec", "tensor", "other") if name in arguments)
    if any(factor.layout != torch.strided for factor in (left, right)):
        return sparse_product(call)
    rows = left.shape[-2] if left.dim() > 1 else 1
    columns = right.shape[-1] if right.dim() > 1 else 1
    conjugated = [factor for factor in (left, right) if factor.is_conj()]
    others = (factor for factor in (left, right, *call.outputs) if not factor.is_conj())
    nbytes = sum(map(operand_copy_nbytes, others))
    if left.dim() == 3 and left.shape[0] and not uses_onednn(left.dtype):
        nbytes //= left.shape[0]  # one product after the other
    is_one = left.dim() == right.dim() == 2
    nbytes += sum(conjugate_copy_nbytes(factor, columns) if is_one else nbytes_of(factor) for factor in conjugated)
    if left.numel() == 0:
        return nbytes + 2 * SCALAR_NBYTES  # nothing to multiply: what is left is beta times the addend
    num_products = left.shape[0] if left.dim() == 3 else 1
    sizes = (rows, left.shape[-1], columns)
    return nbytes + gemm_nbytes(left.dtype, *sizes, call.num_threads, num_products=num_products)


def sparse_product(call: Call) -> int:
    """Bound products with sparse matrices, and gradients: operands twice, the result, a row of sums per thread.

    But for `_sparse_mm_reduce_impl`, also six positions an element of a sparse operand, which may be transposed.
    """
    sparse = 0 if call.name == "_sparse_mm_reduce_impl" else 6 * 8
    numel = max(tensor.numel() for tensor in call.tensors if tensor.layout != torch.strided)
    edge = max(sum(tensor.shape) for tensor in call.tensors)
    nbytes = 2 * sum(map(nbytes_of, call.tensors)) + sum(map(nbytes_of, call.outputs))
    return nbytes + sparse * numel + (4 * call.num_threads + 16) * edge + 4 * SCALAR_NBYTES


def grouped_fallback(call: Call) -> int:
    """Count transformers' loop over experts: one product at a time, written into the output."""
    rows, inner = call["input"].shape[-2:]
    columns = call["weight"].shape[-1]
    shapes = ((rows, inner, columns), (rows, columns, inner), (inner, rows, columns))
    return max(gemm_nbytes(call["input"].dtype, *shape, call.num_threads) for shape in shapes)


def attention(call: Call) -> int:
    return attention_nbytes(call["query"], call["key"], call.num_threads)


def attention_backward(call: Call) -> int:
    return attention_backward_nbytes(call["grad_out"], call["query"], call["key"], call.num_threads)


def _convolution(call: Call, result: Tensor, *, bias: bool) -> Convolution:
    return read_convolution(
        call["input"],
        call["weight"],
        result.shape,
        call["stride"],
        call["padding"],
        call["dilation"],
        call["groups"],
        transposed=call["transposed"],
        bias=bias,
        num_threads=call.num_threads,
    )


def convolution(call: Call) -> int:
    bias = call["bias"]
    return contiguous_copy_nbytes(bias) + convolution_nbytes(_convolution(call, call.outputs[0], bias=bias is not None))


def convolution_backward(call: Call) -> int:
    given = iter(call.outputs)
    outputs = [next(given) if wanted else None for wanted in call["output_mask"]]
    convolution = _convolution(call, call["grad_output"], bias=call["output_mask"][2])
    return convolution_backward_nbytes(convolution, call["grad_output"], outputs)


def unfold(call: Call) -> list[int]:
    """List `im2col`'s contiguous copy, and the result as it starts, as large as the image."""
    return [*contiguous(call), nbytes_of(call["self"])]


def fold_outputs(call: Call) -> dict[int, int]:
    """Correct the bytes of `col2im`'s result: it starts as large as the columns."""
    return {0: max(nbytes_of(call["self"]), nbytes_of(call.outputs[0]))}


def fold(call: Call) -> list[int]:
    """List a contiguous copy of the columns, and the result as it started while it grows (see `fold_outputs`)."""
    nbytes = nbytes_of(call["self"])
    return [*contiguous(call), nbytes if nbytes_of(call.outputs[0]) > nbytes else 0]


def unfold_backward(call: Call) -> int:
    """Count the position of each element along the dimension, in int64, where windows overlap."""
    result = call.outputs[0]
    return 8 * result.shape[call["dim"]] if result.dim() and call["step"] < call["size"] else 0


def repeat(call: Call) -> int:
    """Count sizes and strides of the windows that are copied into; 8 bytes for a number."""
    return max(8, 32 * len(call["repeats"]))


def roll(call: Call) -> list[int]:
    """List a copy for each dimension after the first; and if no dimension is named, a flattened copy."""
    source, dims = call["self"], call["dims"]
    flattened = contiguous(call) if call.on_cuda or not dims else []
    return [*flattened, *([nbytes_of(source)] * (len(dims) - 1))]
