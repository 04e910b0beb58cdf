"""Predict the scratch of a reduction on a CUDA device where blocks share an output.

As `setReduceConfig` has it, in `aten/src/ATen/native/cuda/Reduce.cuh` of PyTorch 2.11 to 2.13.

    threads:  32 to 512 in a block, over outputs where those are next to each other in memory, else over inputs
    blocks:   share an output where each thread still has 256 values, and the device has room for more blocks
    buffer:   one accumulator per output and sharing block; where threads lie over outputs, per thread and vector too,
              which is 128 times as many as there are outputs

How many blocks a device has room for is taken for the largest known: an upper bound, exact unless a smaller device
limits the blocks.
"""

from __future__ import annotations

from collections.abc import Collection
from math import gcd

import torch
from torch import Tensor

MULTIPROCESSORS = 160
"""More than any device has that these kernels know (H100: 132, B200: 148)."""

_THREADS_PER_MULTIPROCESSOR = 2048
_WARP = 32
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread


def reduction_nbytes(
    num_outputs: int,
    inputs_per_output: int,
    *,
    over_fastest: bool,
    itemsize: int,
    vector: int = 4,
    max_threads: int = 512,
) -> list[int]:
    """Count the bytes of the buffer for partial results and of the semaphores; no parts if no output is shared.

    Args:
        over_fastest: whether what is reduced is next to each other in memory.
        itemsize: bytes of an accumulator.
        vector: outputs that a thread takes at once, where what is reduced is not next to each other.
        max_threads: of a block.
    """
    vector = 1 if over_fastest else vector if _is_symbol(num_outputs) else gcd(vector, num_outputs)
    along, across = (inputs_per_output, num_outputs) if over_fastest else (num_outputs // vector, inputs_per_output)
    width, height = _block(along, across, max_threads // vector)
    step_input, step_output = (width, 1) if over_fastest else (1, width)
    if not _is_symbol(inputs_per_output) and -(-inputs_per_output // step_input) < min(height * 16, _MAX_VALUES):
        return []
    step_input *= height
    values_per_thread = -(-inputs_per_output // step_input)
    num_blocks = -(-(num_outputs // vector) // step_output)
    room = MULTIPROCESSORS * (_THREADS_PER_MULTIPROCESSOR // (width * height))
    most = torch.sym_min(-(-room // num_blocks), -(-values_per_thread // _MIN_VALUES))
    sharing = torch.sym_max(most, -(-values_per_thread // _MAX_VALUES))
    per_output = 1 if over_fastest else width * vector
    nbytes = [itemsize * num_outputs * sharing * per_output, 4 * num_blocks]
    if _is_symbol(values_per_thread) or _is_symbol(num_blocks):
        is_shared = torch.sym_min(values_per_thread // _MAX_VALUES, 1)
        return [part * is_shared for part in nbytes]
    return [] if values_per_thread < _MAX_VALUES or num_blocks > room or sharing <= 1 else nbytes


def _is_symbol(size: int | torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt)


def outputs_at_once(tensor: Tensor, dims: Collection[int]) -> int:
    """Return 4, 2 or 1: what divides the outputs next to each other, and all other strides (`get_output_vec_size`)."""
    reduced = {dim % max(1, tensor.dim()) for dim in dims} or set(range(tensor.dim()))
    walked = [dim for dim in range(tensor.dim()) if _is_symbol(tensor.shape[dim]) or tensor.shape[dim] > 1]
    together = 1
    others: list[int] = []
    for dim in sorted(walked, key=tensor.stride):
        if others or dim in reduced or tensor.stride(dim) != together:
            others.append(tensor.stride(dim))
        else:
            together *= tensor.shape[dim]
    return gcd(4, *(size for size in (together, *others) if not _is_symbol(size)))


def reduces_fastest(tensor: Tensor, dims: Collection[int]) -> bool:
    """Whether a reduction of these dimensions (all, if there are none) is over the elements next to each other."""
    reduced = {dim % max(1, tensor.dim()) for dim in dims} or set(range(tensor.dim()))
    strides = [
        (stride, dim in reduced)
        for dim, stride in enumerate(tensor.stride())
        if _is_symbol(tensor.shape[dim]) or tensor.shape[dim] > 1
    ]
    kept = [stride for stride, is_reduced in strides if not is_reduced]
    return not kept or min((stride for stride, is_reduced in strides if is_reduced), default=0) < min(kept)


def _block(along: int, across: int, max_threads: int) -> tuple[int, int]:
    """Return width and height of a block of threads (`set_block_dimension`).

    A symbolic size counts as larger than a block: it is, where an output is shared, and elsewhere it does not matter.
    """
    along, across = (max_threads if _is_symbol(size) else _power(min(size, max_threads)) for size in (along, across))
    height = min(across, max_threads // min(along, _WARP))
    return min(along, max_threads // height), height


def _power(number: int) -> int:
    """Round down to a power of two, at least 1."""
    return 1 << max(0, number.bit_length() - 1)
