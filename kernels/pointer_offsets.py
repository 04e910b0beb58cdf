"""Compute pointer offsets of a Triton launch's tensors, in units from the first, so that vector loads stay aligned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from chunkc.ir.layout import GRAD, PARAM
from chunkc.ir.states import MASTER, is_scale, scale_of
from chunkc.kernels.formats import UNIT, RoundingKey, UpdateFormat


class RoundingSeed(NamedTuple):
    """Seed of a tensor's random bits: its first element in its chunk group, and the key of the update."""

    first_element: int
    key: RoundingKey


def kinds_of(fmt: UpdateFormat) -> list[str]:
    """List the kinds of data of an update, in the order of the columns of pointer offsets."""
    return [PARAM, GRAD, *fmt.kinds, MASTER, *map(scale_of, fmt.kinds)]


def pointer_offsets_of(addresses: np.ndarray, fmt: UpdateFormat, seeds: Sequence[RoundingSeed] = ()) -> Tensor:
    """Compute the offsets of each tensor's data from the first tensor's, on the CPU.

    Args:
        addresses: int64 `[num_tensors, num_kinds]`, in bytes, by `kinds_of`; 0 where the format has no such data.
            Addresses of one kind differ by whole units, of 16 elements (`alignment_of`).
        seeds: each tensor's, for a stochastic format.

    Returns:
        int64 `[num_tensors, num_kinds]`: in units, of scales in elements. With seeds, their three numbers follow.
    """
    pointer_offsets = (addresses - addresses[0]) // alignment_of(fmt)
    if fmt.stochastic:
        seed_columns = np.array([(seed.first_element, *seed.key) for seed in seeds], dtype=np.int64)
        pointer_offsets = np.concatenate([pointer_offsets, seed_columns], axis=1)
    return torch.from_numpy(pointer_offsets)


def alignment_of(fmt: UpdateFormat) -> np.ndarray:
    """Return the unit in bytes, for each kind, of address differences in a launch: int64 `[num_kinds]`."""
    dtypes = {PARAM: fmt.param_dtype, GRAD: fmt.grad_dtype, MASTER: fmt.master_dtype or torch.float32}
    sizes = [4 if is_scale(kind) else dtypes.get(kind, fmt.moment_dtype).itemsize * UNIT for kind in kinds_of(fmt)]
    return np.array(sizes, dtype=np.int64)
