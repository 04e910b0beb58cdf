"""Scratch bytes of lookups, gathers and scatters on the CPU: converted indices, low-precision copies."""

from __future__ import annotations

import torch
from torch import Tensor

from chunkc.passes.scratch_kernels import contiguous_copy_nbytes, nbytes_of
from chunkc.passes.scratch_rules import SCALAR_NBYTES, Call, scalars_nbytes

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def embedding_rule(call: Call) -> int:
    return contiguous_copy_nbytes(call["indices"])


def scatter_rule(call: Call) -> int:
    """Low precision is gathered and scattered in float32; indices that are not int64 are cast."""
    nbytes = 0
    for tensor in call.tensors:
        if tensor.dtype in _LOW_PRECISION:
            nbytes += nbytes_of(tensor, 4)
        elif tensor.dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
            nbytes += nbytes_of(tensor, 8)
        nbytes += contiguous_copy_nbytes(tensor)
    return nbytes + scalars_nbytes(call)


def gather_rule(call: Call) -> int:
    low = call["self"].dtype in _LOW_PRECISION
    index = call["index"]
    cast = nbytes_of(index, 8) if index.dtype != torch.int64 else 0
    return cast + contiguous_copy_nbytes(index) + (nbytes_of(call.outputs[0], 4) if low else 0)


def index_rule(call: Call) -> int:
    """Indices are brought to one shape and dtype; a mask becomes one index per dimension."""
    nbytes = 0
    for index in (leaf for leaf in call["indices"] if isinstance(leaf, Tensor)):
        width = 8 * (1 + 2 * index.dim()) if index.dtype in (torch.bool, torch.uint8) else 8
        strided = index.dtype != torch.int64 or not index.is_contiguous()
        nbytes += index.numel() * width if strided else 0
    return nbytes + SCALAR_NBYTES


def masked_index_rule(call: Call) -> int:
    indices = sum(nbytes_of(leaf, 8) for leaf in call["indices"] if isinstance(leaf, Tensor))
    values = call.arguments.get("values")
    moved = call.outputs[0] if values is None else values
    return 2 * nbytes_of(moved) + 3 * indices + 2 * moved.numel() + 4 * SCALAR_NBYTES
