"""Parameters that stay on a GPU, in launches of many: which of them one launch can update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chunkc.ir.layout import GRAD, PARAM
from chunkc.ir.states import MASTER, MASTER_LOW
from chunkc.ir.strides import is_dense
from chunkc.kernels.formats import UpdateFormat
from chunkc.kernels.pointer_offsets import RoundingSeed, alignment_of, kinds_of, pointer_offsets_of
from chunkc.optim.on_device import POINTER_OFFSETS_NBYTES, Sent, upload
from chunkc.optim.rule import ResidentTensor
from chunkc.utils.recent import Recent

MAX_NUM_ELEMENTS = 1 << 23
MAX_NUM_TENSORS = 1 << 11
"""Of one launch: its tables are then a quarter of what is kept (`chunkc.optim.on_device.TABLE_NBYTES`)."""


@dataclass(frozen=True, eq=False)
class Batch:
    """What one launch updates.

    Attributes:
        addresses: int64 `[num_tensors, num_kinds]`, see `chunkc.kernels.pointer_offsets.pointer_offsets_of`.
    """

    fmt: UpdateFormat
    tensors: Sequence[ResidentTensor]
    addresses: np.ndarray

    @property
    def written(self) -> list[torch.Tensor]:
        """The parameters and states of all."""
        return [tensor for of in self.tensors for tensor in (of.parameter, *of.states.values())]


class SentPointerOffsets:
    """Distances on a device; those used last are kept, `POINTER_OFFSETS_NBYTES` of them.

    Gradients may lie elsewhere in each step, and what pointer offsets take on the device stays the same.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: Recent[tuple, Sent] = Recent(POINTER_OFFSETS_NBYTES, lambda sent: sent.on_device.nbytes)

    def of(self, batch: Batch, sizes: tuple, seeds: Sequence[RoundingSeed] = ()) -> torch.Tensor:
        """Those of a batch, as they are now.

        Args:
            sizes: what tells the batch from others of its format.
            seeds: see `chunkc.kernels.pointer_offsets.pointer_offsets_of`.
        """
        key, now = (batch.fmt, *sizes), pointer_offsets_of(batch.addresses, batch.fmt, seeds)
        sent = self._sent.find(key) or self._sent.keep(key, Sent(now, upload(now, self._device)))
        sent.follow(now)
        return sent.on_device


def goes_along(tensor: ResidentTensor) -> bool:
    """Whether a parameter can be updated with others: its data lie alike, without gaps, and are not too many."""
    parameter, gradient = tensor.parameter, tensor.parameter.grad
    assert gradient is not None
    if not 0 < parameter.numel() <= MAX_NUM_ELEMENTS or gradient.is_neg() or not is_dense(parameter):
        return False
    if parameter.is_complex():
        return False
    return gradient.stride() == parameter.stride()


def batches(tensors: Iterable[tuple[ResidentTensor, UpdateFormat]]) -> list[Batch]:
    """Tensors that go along, as few launches: those of one format whose addresses are aligned alike go together.

    Parameters that share memory are updated one after the other, as in `torch.optim`.
    """
    alike: dict[tuple, list[tuple[ResidentTensor, list[int]]]] = {}
    for tensor, fmt in tensors:
        addresses = _addresses(tensor, fmt)
        places = tuple(address % unit for address, unit in zip(addresses, alignment_of(fmt).tolist()))
        alike.setdefault((fmt, places), []).append((tensor, addresses))
    found = []
    for (fmt, _), members in alike.items():
        for part in _parts(members):
            batch = Batch(fmt, [tensor for tensor, _ in part], np.array([addresses for _, addresses in part]))
            found += [batch] if _are_apart(batch) else _one_by_one(batch)
    return found


def _addresses(tensor: ResidentTensor, fmt: UpdateFormat) -> list[int]:
    """In bytes, by `kinds_of` the format; 0 for what there is not."""
    buffers = {PARAM: tensor.parameter, GRAD: tensor.parameter.grad, **tensor.states}
    buffers[MASTER] = buffers.get(MASTER, buffers.get(MASTER_LOW))
    return [0 if (buffer := buffers.get(kind)) is None else buffer.data_ptr() for kind in kinds_of(fmt)]


def _parts(members: Sequence[tuple[ResidentTensor, list[int]]]) -> Iterable[list[tuple[ResidentTensor, list[int]]]]:
    """Runs of them that are not too many for a launch."""
    part: list[tuple[ResidentTensor, list[int]]] = []
    num_elements = 0
    for member in members:
        numel = member[0].parameter.numel()
        if part and (num_elements + numel > MAX_NUM_ELEMENTS or len(part) == MAX_NUM_TENSORS):
            yield part
            part, num_elements = [], 0
        part.append(member)
        num_elements += numel
    yield part


def _are_apart(batch: Batch) -> bool:
    """Whether no two of the parameters share memory."""
    begins = batch.addresses[:, 0]
    order = np.argsort(begins)
    ends = begins + np.array([tensor.parameter.nbytes for tensor in batch.tensors])
    return bool((ends[order][:-1] <= begins[order][1:]).all())


def _one_by_one(batch: Batch) -> list[Batch]:
    return [
        Batch(batch.fmt, [tensor], batch.addresses[index : index + 1]) for index, tensor in enumerate(batch.tensors)
    ]
