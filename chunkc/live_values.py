"""Values of earlier calls: watched for as long as somebody holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from chunkc.passes.cuda_memory import rounded_nbytes


def storages_nbytes(values: Iterable[object]) -> int:
    """Bytes of the storages of the tensors among `values`, each storage once."""
    storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclass
class LiveValues:
    """Storages that calls returned, saved or were given, watched without keeping them alive.

    Args:
        granule_nbytes: the allocator gives each a multiple of this.
    """

    granule_nbytes: int = 1
    _watched: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)

    def watch(self, tensors: Iterable[object], nbytes: int | None = None) -> None:
        """Watch tensors' storages; with `nbytes`, let each stand for so many bytes."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                taken_nbytes = rounded_nbytes(storage.nbytes(), self.granule_nbytes) if nbytes is None else nbytes
                self._watched[storage.data_ptr()] = StorageWeakRef(storage), taken_nbytes

    def nbytes(self, leaving_out: Iterable[object] = ()) -> int:
        """Bytes of those still alive, without the storages of `leaving_out`."""
        self._watched = {key: (ref, n) for key, (ref, n) in self._watched.items() if not ref.expired()}
        skipped = {t.untyped_storage().data_ptr() for t in leaving_out if isinstance(t, torch.Tensor)}
        return sum(n for key, (_, n) in self._watched.items() if key not in skipped)
