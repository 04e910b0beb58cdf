"""One function per kind of operator: the scratch bytes of a call on the CPU, from its arguments' metadata.

The functions are put in a table by operator in `chunkc.passes.scratch`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from chunkc.passes.scratch_kernels import (
    attention_backward_nbytes,
    attention_nbytes,
    contiguous_copy_nbytes,
    convolution_nbytes,
    copy_block_nbytes,
    gemm_nbytes,
    nbytes_of,
    operand_copy_nbytes,
)

# A Python number becomes a 0-dim tensor (8 bytes, 16 if complex), which is cast twice at most.
SCALAR_NBYTES = 32
_LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Call:
    """One call of an operator: arguments by name, outputs (tensors only) and the threads it may use."""

    target: torch._ops.OpOverload
    arguments: dict[str, Any]
    outputs: tuple[Tensor, ...]
    num_threads: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors among the arguments, also those in lists."""
        return tuple(leaf for leaf in tree_leaves(list(self.arguments.values())) if isinstance(leaf, Tensor))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


def scalars_nbytes(call: Call) -> int:
    """Bytes for Python numbers that stand where the operator computes with tensors."""
    numbers = 0
    for parameter in call.target._schema.arguments:
        if parameter.name in ("alpha", "beta"):  # factors inside the kernel
            continue
        kind = str(parameter.type)
        takes_number = any(word in kind for word in ("Tensor", "number", "Scalar"))
        numbers += takes_number and isinstance(call[parameter.name], int | float | complex)
    return numbers * SCALAR_NBYTES


def _common_dtype(call: Call, operands: Sequence[Tensor]) -> torch.dtype:
    """What an elementwise operator computes in: its operands' promotion, floating if only the output is."""
    # Vectors decide before 0-dim tensors, and those before Python numbers.
    common = torch.empty((1,), dtype=torch.bool, device="meta")
    if not any(operand.dim() for operand in operands):
        common = common[0]
    for operand in sorted(operands, key=lambda operand: operand.dim() == 0):
        like = torch.empty((1,) * min(operand.dim(), 1), dtype=operand.dtype, device="meta")
        common = torch.empty_like(common, dtype=torch.result_type(common, like))
    for name, number in call.arguments.items():
        if isinstance(number, int | float | complex) and name not in ("alpha", "beta"):
            common = torch.empty_like(common, dtype=torch.result_type(common, number))
    floating = next((out.dtype for out in call.outputs if out.dtype.is_floating_point), None)
    integral = not (common.dtype.is_floating_point or common.dtype.is_complex)
    return floating if floating is not None and integral else common.dtype


def _casts(call: Call, operands: Sequence[Tensor]) -> int:
    common = _common_dtype(call, operands)
    inputs = sum(nbytes_of(t, common.itemsize) for t in operands if t.dtype != common)
    return inputs + sum(nbytes_of(t, common.itemsize) for t in call.outputs if t.dtype not in (common, torch.bool))


def nothing_rule(call: Call) -> int:
    return 0


def guess_rule(call: Call) -> int:
    """For operators that nobody looked at: several copies of everything that goes in and comes out."""
    everything = (*call.tensors, *call.outputs)
    return 8 * sum(nbytes_of(t, max(t.itemsize, 4)) for t in everything) + 64 * SCALAR_NBYTES


def pointwise_rule(call: Call) -> int:
    """A cast of each operand, and of the output, that is not in the common dtype."""
    return _casts(call, call.tensors) + scalars_nbytes(call)


def select_rule(call: Call) -> int:
    """`where`, `masked_fill`: as elementwise, but the condition stays as it is."""
    condition = call.arguments.get("condition", call.arguments.get("mask"))
    return _casts(call, [t for t in call.tensors if t is not condition]) + scalars_nbytes(call)


def pointwise_temporaries_rule(call: Call) -> int:
    """Elementwise in several steps, or on contiguous copies."""
    widest = max((nbytes_of(t, max(t.itemsize, 4)) for t in (*call.tensors, *call.outputs)), default=0)
    return pointwise_rule(call) + contiguous_copy_nbytes(*call.tensors) + 2 * widest + 4 * SCALAR_NBYTES


def contiguous_rule(call: Call) -> int:
    """Kernels that read contiguous memory copy the inputs that are not."""
    return sum(contiguous_copy_nbytes(t) for t in call.tensors) + scalars_nbytes(call)


def copy_rule(call: Call) -> int:
    source = call.tensors[-1]
    return copy_block_nbytes(source) if all(out.dtype == source.dtype for out in call.outputs) else 0


def reduction_rule(call: Call) -> int:
    """A cast of the input to what is summed up in, and one partial result per thread."""
    source, result = call["self"], call.outputs[0]
    nbytes = 16 * call.num_threads * max(1, len(call.outputs)) if result.numel() == 1 else 0
    if call.target._schema.name in ("aten::max", "aten::min", "aten::aminmax"):
        nbytes += contiguous_copy_nbytes(source)
    if result.dtype != source.dtype:
        nbytes += nbytes_of(source, max(result.itemsize, source.itemsize))
    if source.dtype in _LOW_PRECISION and not _sums_in_one_run(call):
        nbytes += nbytes_of(source, 4) + nbytes_of(result, 4)
    return nbytes + 4 * SCALAR_NBYTES


def _sums_in_one_run(call: Call) -> bool:
    """Whether a low-precision sum reduces one contiguous run of dimensions: then nothing is cast."""
    source = call["self"]
    if call.target._schema.name != "aten::sum" or not source.is_contiguous():
        return False
    dims = call.arguments.get("dim") or range(source.dim())
    reduced = [dim % source.dim() in {d % source.dim() for d in dims} for dim in range(source.dim())]
    runs = [is_reduced for dim, is_reduced in enumerate(reduced) if source.shape[dim] != 1]
    return sum(now and not before for before, now in zip([False, *runs], runs)) <= 1


def logsumexp_rule(call: Call) -> int:
    """The exponentials, the maxima, and one partial sum per thread where everything is reduced."""
    source, result = call["self"], call.outputs[0]
    cast = nbytes_of(source, result.itemsize) if source.dtype != result.dtype else 0
    partial = 8 * call.num_threads + SCALAR_NBYTES if result.numel() == 1 else 0
    low = nbytes_of(source, 4) + nbytes_of(result, 4) if source.dtype in _LOW_PRECISION else 0
    return nbytes_of(source, result.itemsize) + nbytes_of(result) + cast + partial + low


def safe_softmax_rule(call: Call) -> int:
    """A mask of the inputs that are -inf, and whether a whole row is."""
    source, result = call["self"], call.outputs[0]
    rows = result.numel() // result.shape[call["dim"]] if result.dim() and result.numel() else 0
    cast = nbytes_of(source, result.itemsize) if source.dtype != result.dtype else 0
    return result.numel() + rows + result.itemsize + contiguous_copy_nbytes(source) + cast


def scan_rule(call: Call) -> int:
    source, result = call["self"], call.outputs[0]
    return nbytes_of(source, result.itemsize) if source.dtype != result.dtype else 0


def sort_rule(call: Call) -> int:
    """The indices of one row at a time."""
    source = call["self"]
    return 8 * source.shape[call["dim"]] if source.dim() else 0


def dropout_backward_rule(call: Call) -> int:
    """The mask in the gradient's dtype; an integer gradient is converted step by step."""
    steps = 1 if call["grad_output"].dtype.is_floating_point else 3
    return steps * nbytes_of(call["mask"], call.outputs[0].itemsize) + 2 * SCALAR_NBYTES


def dropout_rule(call: Call) -> int:
    return nbytes_of(call["input"])


def matrix_product_rule(call: Call) -> int:
    """Operands that the library cannot read in place are copied; oneDNN packs low precision."""
    arguments = call.arguments
    left = next(arguments[name] for name in ("mat1", "batch1", "mat", "self") if name in arguments)
    right = next(arguments[name] for name in ("mat2", "batch2", "vec", "tensor", "other") if name in arguments)
    rows = left.shape[-2] if left.dim() > 1 else 1
    columns = right.shape[-1] if right.dim() > 1 else 1
    nbytes = sum(map(operand_copy_nbytes, (left, right, *call.outputs)))
    if left.numel() == 0:
        return nbytes + 2 * SCALAR_NBYTES  # nothing to multiply: what is left is beta times the addend
    return nbytes + gemm_nbytes(left.dtype, rows, left.shape[-1], columns, call.num_threads)


def grouped_fallback_rule(call: Call) -> int:
    """Transformers' loop over experts: one product at a time, written into the output."""
    rows, inner = call["input"].shape[-2:]
    columns = call["weight"].shape[-1]
    shapes = ((rows, inner, columns), (rows, columns, inner), (inner, rows, columns))
    return max(gemm_nbytes(call["input"].dtype, *shape, call.num_threads) for shape in shapes)


def attention_rule(call: Call) -> int:
    return attention_nbytes(call["query"], call["key"], call.num_threads)


def attention_backward_rule(call: Call) -> int:
    return attention_backward_nbytes(call["grad_out"], call["query"], call["key"], call.num_threads)


def convolution_rule(call: Call) -> int:
    return contiguous_copy_nbytes(call["input"], call["weight"]) + convolution_nbytes(
        call["input"],
        call["weight"],
        call.outputs[0].shape,
        groups=call["groups"],
        num_threads=call.num_threads,
        transposed=call["transposed"],
    )


def convolution_backward_rule(call: Call) -> int:
    copies = contiguous_copy_nbytes(call["grad_output"], call["input"], call["weight"])
    return copies + convolution_nbytes(
        call["input"],
        call["weight"],
        call["grad_output"].shape,
        groups=call["groups"],
        num_threads=call.num_threads,
        backward=True,
        transposed=call["transposed"],
    )


def layer_norm_backward_rule(call: Call) -> int:
    """Partial gradients of weight and bias for each thread."""
    source, weight = call["input"], call["weight"]
    itemsize = max(source.itemsize, weight.itemsize if weight is not None else 0)
    per_row = math.prod(call["normalized_shape"])
    wanted = call["output_mask"][1] or call["output_mask"][2]
    partial = 2 * call.num_threads * per_row * itemsize if wanted else 0
    return partial + sum(contiguous_copy_nbytes(t) for t in (call["grad_out"], source, weight, weight, call["bias"]))


def group_norm_backward_rule(call: Call) -> int:
    """Two sums per image and channel; per thread too where channels come last."""
    source = call["input"]
    sums = 2 * source.shape[0] * source.shape[1] * max(source.itemsize, 4)
    copies = contiguous_copy_nbytes(call["grad_out"]) + contiguous_copy_nbytes(source)
    return sums + copies + (call.num_threads * sums if copies else 0)


def batch_norm_rule(call: Call) -> int:
    source = call["input"]
    copies = sum(contiguous_copy_nbytes(t) for t in call.tensors)
    return 2 * source.shape[1] * max(source.itemsize, 4) + 2 * copies + SCALAR_NBYTES


def batch_norm_backward_rule(call: Call) -> int:
    copies = contiguous_copy_nbytes(call["input"], call["grad_out"])
    return nbytes_of(call["input"]) + 4 * call["input"].shape[1] * 8 + copies


def histogram_rule(call: Call) -> int:
    bins = call["bins"]
    return (bins + 1) * 8 * (call.num_threads + 1) + 2 * SCALAR_NBYTES


def pooling_offsets_rule(call: Call) -> int:
    """Windows written out as int64 indices, some copies of them at a time."""
    return 16 * sum(t.numel() for t in call.tensors) + 64 * max(t.numel() for t in call.outputs) + 1024


def constant_rule(call: Call) -> int:
    return 16 * SCALAR_NBYTES
