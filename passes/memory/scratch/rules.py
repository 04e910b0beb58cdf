"""Count the scratch bytes of calls on the CPU, from metadata: a function for each kind of operator.

`chunkc.passes.memory.scratch.operators` says which operators they are for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from chunkc.passes.memory.scratch.copies import LOW_PRECISION, contiguous_copy_nbytes, copy_block_nbytes, nbytes_of
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

# A Python number becomes a 0-dim tensor (8 bytes, 16 if complex), which is cast twice at most.
SCALAR_NBYTES = 32


@dataclass(frozen=True)
class Call:
    """A call of an operator: arguments by name, outputs (tensors only) and the threads it may use."""

    target: torch._ops.OpOverload
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...]
    num_threads: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors among the arguments, also those in lists."""
        return tuple(leaf for leaf in tree_leaves(list(self.arguments.values())) if isinstance(leaf, Tensor))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


# Overloads that take a Python number where the operator computes with tensors, and make a tensor of it.
_WRAPS_NUMBERS = frozenset(
    f"aten::{name}.Scalar"
    for name in [
        "add",
        "sub",
        "mul",
        "div",
        "rsub",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "fmod",
        "remainder",
        "floor_divide",
        "pow",
        "copysign",
    ]
) | frozenset(
    f"aten::{name}"
    for name in [
        "div.Scalar_mode",
        "xlogy.Scalar_Self",
        "xlogy.Scalar_Other",
        "bitwise_and.Scalar",
        "bitwise_or.Scalar",
        "bitwise_xor.Scalar",
        "bitwise_and.Scalar_Tensor",
        "bitwise_or.Scalar_Tensor",
        "bitwise_xor.Scalar_Tensor",
        "bitwise_left_shift.Tensor_Scalar",
        "bitwise_right_shift.Tensor_Scalar",
        "bitwise_left_shift.Scalar_Tensor",
        "bitwise_right_shift.Scalar_Tensor",
        "remainder.Scalar_Tensor",
        "special_zeta.other_scalar",
        "__lshift__.Scalar",
        "__rshift__.Scalar",
        "__ilshift__.Scalar",
        "__irshift__.Scalar",
    ]
)


def numbers_nbytes(call: Call, common: torch.dtype) -> int:
    """Count the bytes of the 0-dim tensors that Python numbers become, each cast to the common dtype."""
    name = call.target._schema.name
    if not name.endswith("__"):
        name = name.removesuffix("_")  # `mul_` makes a tensor of a number as `mul` does
    wraps = f"{name}.{call.target._overloadname}" in _WRAPS_NUMBERS and call.target._schema.name != "aten::pow_"
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


def nothing_rule(call: Call) -> int:
    return 0


def contiguous_result_rule(call: Call) -> int:
    """Count what copying the operand takes: the result is its contiguous copy."""
    return max(map(copy_block_nbytes, call.tensors))


def gathered_rule(call: Call) -> int:
    """Count the result once more: Gloo gathers into memory of its own."""
    return sum(map(nbytes_of, call.outputs))


def reduced_rule(call: Call) -> int:
    """Count the sums of all ranks, on every rank; the result is a part of them."""
    return sum(map(nbytes_of, call.tensors))


def pointwise_rule(call: Call) -> int:
    """Count a cast of each operand, and of the output, that is not in the common dtype; and of numbers."""
    operands = call.tensors
    return _casts(call, operands) + numbers_nbytes(call, _common_dtype(call, operands))


def select_rule(call: Call) -> int:
    """Count `where`: as elementwise, but the condition is not cast."""
    operands = [t for t in call.tensors if t is not call["condition"]]
    return _casts(call, operands) + numbers_nbytes(call, _common_dtype(call, operands))


def triangle_rule(call: Call) -> int:
    """Count `tril`, `triu`: a copy of matrices that do not lie one after another in memory; in place, two."""
    source, in_place = call["self"], call.target._schema.is_mutable
    if source.is_contiguous():  # maybe with other strides along dimensions of one element
        usual = all(s == math.prod(source.shape[dim + 1 :]) for dim, s in enumerate(source.stride()))
        return nbytes_of(source) if in_place and not usual else 0
    if in_place and source.dim() <= 3:
        return 0
    distance = source.shape[-1] * source.shape[-2]
    for dim in reversed(range(source.dim() - 2)):
        if in_place and dim == 0 and (source.stride(0) == 0 or source.shape[0] == 1):
            continue
        if source.stride(dim) != distance:
            return nbytes_of(source) * (2 if in_place else 1)
        distance = distance * source.shape[dim]
    return 0


def log_gamma_rule(call: Call) -> int:
    """Count `mvlgamma`: operands of `p` terms, and a number that is added to their sum; in place, the result too.

    Before there is a result, the operands are made of `p` numbers and a cast.
    """
    result, terms = call.outputs[0], call["p"]
    number = 8 + (result.itemsize if result.dtype != torch.float64 else 0)
    made = nbytes_of(result) if call.target._schema.is_mutable else 0
    making = terms * result.itemsize + _casts(call, call.tensors) - (nbytes_of(result) - made)
    return terms * nbytes_of(result) + max(made + number, making)


def distance_rule(call: Call) -> int:
    """Count `dist`: the difference, and for the largest or the least of complex ones their magnitudes, as in a norm."""
    source = call["self"]
    numel = math.prod(torch.broadcast_shapes(source.shape, call["other"].shape))
    if not source.is_complex():
        return numel * call.outputs[0].itemsize + _casts(call, call.tensors)
    single = source.itemsize if numel == 1 else 0
    return numel * source.itemsize * (5 if math.isinf(call["p"]) else 2) // 2 + single


def narrow_copy_rule(call: Call) -> int:
    """Count a contiguous copy of all; the block for transposing a matrix is freed before the result exists."""
    source = call["self"]
    if source.is_contiguous():
        return 0
    return max(nbytes_of(source), contiguous_copy_nbytes(source) - nbytes_of(call.outputs[0]))


def scaled_rule(call: Call) -> int:
    """Count `deg2rad`, `rad2deg`: a cast, and the number that multiplies it."""
    dtype = call.outputs[0].dtype
    cast = nbytes_of(call["self"], dtype.itemsize) if call["self"].dtype != dtype else 0
    return cast + 8 + (dtype.itemsize if dtype != torch.float64 else 0)


def ldexp_rule(call: Call) -> int:
    """Count a power of two for every exponent, with its base and casts; or, after that, casts for the product.

    A floating number with an integer exponent takes nothing (`BinaryOps.cpp`, `_ldexp_int_exponent`).
    """
    source, exponents, result = call["self"], call["other"], call.outputs[0]
    if source.is_floating_point() and not (exponents.is_floating_point() or exponents.is_complex()):
        return 0
    has_own_base = source.is_complex() or (source.is_floating_point() and source.dtype != torch.float32)
    base = torch.empty((), dtype=source.dtype if has_own_base else torch.float64, device="meta")
    dtype = torch.result_type(exponents, base if has_own_base else 2.0)
    powers = torch.empty((), dtype=dtype, device="meta").expand(exponents.shape)
    made = [result] if call.target._schema.is_mutable else []
    common = common_dtype([source, powers], [], call.outputs)
    multiplying = sum(nbytes_of(t, common.itemsize) for t in (source, powers, *made) if t.dtype != common)
    raising = base.itemsize + sum(nbytes_of(t, dtype.itemsize) for t in (base, exponents) if t.dtype != dtype)
    return nbytes_of(powers) + max(multiplying, raising - (0 if made else nbytes_of(result)))


def isinf_rule(call: Call) -> int:
    """Count absolute values, and the number that they are compared with; of complex numbers, part by part."""
    source = call["self"]
    if source.is_complex():
        return nbytes_of(source) // 2 + source.numel() + 8 + (4 if source.dtype == torch.complex64 else 0)
    if not source.dtype.is_floating_point:
        return 0
    return nbytes_of(source) + 8 + (source.itemsize if source.dtype != torch.float64 else 0)


def gelu_backward_rule(call: Call) -> int:
    """Count copies into the layout of a contiguous input, for oneDNN; else casts."""
    source = call["self"]
    if not source.is_contiguous():
        return _casts(call, call.tensors)
    return sum(nbytes_of(t) for t in (call["grad_output"], *call.outputs) if not t.is_contiguous())


def fma_rule(call: Call) -> int:
    """Count the product."""
    return nbytes_of(call.outputs[0])


def concatenation_rule(call: Call) -> int:
    """Count a copy, one at a time, of each tensor that is not in the common dtype."""
    dtype = call.outputs[0].dtype
    return max((nbytes_of(t) for t in call.tensors if t.dtype != dtype), default=0)


def contiguous_rule(call: Call) -> int:
    """Count contiguous copies of inputs that are not contiguous, for kernels that read contiguous memory."""
    return sum(contiguous_copy_nbytes(t) for t in call.tensors)


def shuffle_rule(call: Call) -> int:
    """Count `channel_shuffle`: a copy of an operand that is neither contiguous nor with channels last."""
    source = call["self"]
    if source.dim() == 4 and source.is_contiguous(memory_format=torch.channels_last):
        return 0
    return contiguous_copy_nbytes(source)


def copy_rule(call: Call) -> int:
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


def scan_rule(call: Call) -> int:
    source, result = call["self"], call.outputs[0]
    return nbytes_of(source, result.itemsize) if source.dtype != result.dtype else 0


def sort_rule(call: Call) -> int:
    """Count the indices of one row at a time."""
    source = call["self"]
    return 8 * source.shape[call["dim"]] if source.dim() else 0


def dropout_backward_rule(call: Call) -> int:
    """Count the mask in the gradient's dtype, the number that multiplies it, and the cast of an integer gradient."""
    gradient, result = call["grad_output"], call.outputs[0]
    cast = nbytes_of(gradient, result.itemsize) if gradient.dtype != result.dtype else 0
    number = 8 + (result.itemsize if result.dtype != torch.float64 else 0)
    return nbytes_of(call["mask"], gradient.itemsize) + number + cast


def dropout_rule(call: Call) -> int:
    """Count the mask in the operand's dtype; or, before that, the number by which it is scaled."""
    return max(nbytes_of(call["input"]), 8 + call["input"].itemsize)


def matrix_product_rule(call: Call) -> int:
    """Count copies of operands that the library cannot read in place, and oneDNN's packing of low precision."""
    arguments = call.arguments
    left = next(arguments[name] for name in ("mat1", "batch1", "mat", "self") if name in arguments)
    right = next(arguments[name] for name in ("mat2", "batch2", "vec", "tensor", "other") if name in arguments)
    if any(factor.layout != torch.strided for factor in (left, right)):
        return _sparse_product_nbytes(left, right, call.outputs[0])
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
    return nbytes + gemm_nbytes(left.dtype, rows, left.shape[-1], columns, call.num_threads)


def sampled_product_rule(call: Call) -> int:
    """Bound `sparse_sampled_addmm`: the product, dense, and its sum with the addend; contiguous copies."""
    return 2 * nbytes_of(call.outputs[0]) + contiguous_copy_nbytes(call["mat1"], call["mat2"]) + SCALAR_NBYTES


def sparse_reduction_rule(call: Call) -> int:
    """Count `_sparse_mm_reduce_impl`: a contiguous copy of the dense matrix; in low precision, a sum per thread."""
    other = call["other"]
    sums = 4 * call.num_threads * other.shape[-1] if other.dtype in LOW_PRECISION else 0
    return contiguous_copy_nbytes(other) + sums


def sparse_reduction_backward_rule(call: Call) -> int:
    """Bound the backward: positions, sorted by column, as 64-bit integers; values in that order; contiguous copies."""
    sparse, grad = call["self"], call["grad_out"]
    num_values = sparse.values().numel()
    positions = 8 * (6 * num_values + sparse.shape[-1] + 3) + 2 * num_values * sparse.itemsize
    copies = contiguous_copy_nbytes(grad, call["weight"], call["arg_out"])
    return positions + copies + nbytes_of(grad) + 4 * call.num_threads * grad.shape[-1]


def _sparse_product_nbytes(left: Tensor, right: Tensor, result: Tensor) -> int:
    """Bound the product of matrices of which one is sparse: operands and result; where the left one is dense, six
    positions an element of the right one, which is transposed."""
    nbytes = sum(map(nbytes_of, (left, right, result))) + 16 * sum(right.shape) + 2 * SCALAR_NBYTES
    return nbytes + (6 * 8 * right.numel() if left.layout == torch.strided else 0)


def grouped_fallback_rule(call: Call) -> int:
    """Count transformers' loop over experts: one product at a time, written into the output."""
    rows, inner = call["input"].shape[-2:]
    columns = call["weight"].shape[-1]
    shapes = ((rows, inner, columns), (rows, columns, inner), (inner, rows, columns))
    return max(gemm_nbytes(call["input"].dtype, *shape, call.num_threads) for shape in shapes)


def attention_rule(call: Call) -> int:
    return attention_nbytes(call["query"], call["key"], call.num_threads)


def attention_backward_rule(call: Call) -> int:
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


def convolution_rule(call: Call) -> int:
    bias = call["bias"]
    return contiguous_copy_nbytes(bias) + convolution_nbytes(_convolution(call, call.outputs[0], bias=bias is not None))


def convolution_backward_rule(call: Call) -> int:
    given = iter(call.outputs)
    outputs = [next(given) if wanted else None for wanted in call["output_mask"]]
    convolution = _convolution(call, call["grad_output"], bias=call["output_mask"][2])
    return convolution_backward_nbytes(convolution, call["grad_output"], outputs)


def col2im_outputs(call: Call) -> dict[int, int]:
    """Correct the result's bytes: it starts as large as the columns."""
    return {0: max(nbytes_of(call["self"]), nbytes_of(call.outputs[0]))}


def col2im_rule(call: Call) -> int:
    """Count a contiguous copy of the columns, and the result as it started while it grows (see `col2im_outputs`)."""
    columns, result = call["self"], call.outputs[0]
    grows = nbytes_of(result) > nbytes_of(columns)
    return contiguous_copy_nbytes(columns) + (nbytes_of(columns) if grows else 0)


def unfold_backward_rule(call: Call) -> int:
    """Count the position of each element along the dimension, in int64, where windows overlap."""
    result = call.outputs[0]
    return 8 * result.shape[call["dim"]] if result.dim() and call["step"] < call["size"] else 0


def repeat_rule(call: Call) -> int:
    """Count sizes and strides of the windows that are copied into; 8 bytes for a number."""
    return max(8, 32 * len(call["repeats"]))


def roll_rule(call: Call) -> int:
    """Count a copy for each dimension after the first; and if no dimension is named, a flattened copy."""
    source, dims = call["self"], call["dims"]
    if not dims:
        return contiguous_copy_nbytes(source)
    return nbytes_of(source) * (len(dims) - 1)
