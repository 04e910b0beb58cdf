"""Where the tensors lie that one launch in Triton updates: in units from the first, so that vectors stay vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from chunkc.ir.layout import GRAD, PARAM
from chunkc.ir.states import MASTER, is_scale
from chunkc.kernels.formats import UNIT, RoundingKey, UpdateFormat


class RoundingSeed(NamedTuple):
    """What the random bits of a tensor derive from: its first element in its chunk group, and the key of the update."""

    first_element: int
    key: RoundingKey


def kinds_of(fmt: UpdateFormat) -> list[str]:
    """Kinds of data of an update, in the order of its slots and of the columns of pointer offsets."""
    return [field.name for field in fields(fmt.slots)]  # type: ignore[arg-type]


def pointer_offsets_of(addresses: np.ndarray, fmt: UpdateFormat, seeds: Sequence[RoundingSeed] = ()) -> Tensor:
    """Where each tensor of a launch has its data, from where the first one has its own; on the CPU.

    Args:
        addresses: int64 `[num_tensors, num_kinds]`, in bytes, by `kinds_of`; 0 where the format has no such data. Those
            of one kind differ by whole units, of 16 elements (`alignment_of`).
        seeds: of a stochastic format, what each tensor's random bits derive from.

    Returns:
        int64 `[num_tensors, num_kinds]`: in units, of scales in elements. With seeds, their three numbers follow.
    """
    pointer_offsets = (addresses - addresses[0]) // alignment_of(fmt)
    if fmt.stochastic:
        own = np.array([(of.first_element, *of.key) for of in seeds], dtype=np.int64)
        pointer_offsets = np.concatenate([pointer_offsets, own], axis=1)
    return torch.from_numpy(pointer_offsets)


def alignment_of(fmt: UpdateFormat) -> np.ndarray:
    """Bytes by which addresses of one kind differ in a launch, or a multiple of them: int64 `[num_kinds]`."""
    dtypes = {PARAM: fmt.param_dtype, GRAD: fmt.grad_dtype, MASTER: fmt.master_dtype or torch.float32}
    sizes = [4 if is_scale(kind) else dtypes.get(kind, fmt.moment_dtype).itemsize * UNIT for kind in kinds_of(fmt)]
    return np.array(sizes, dtype=np.int64)
