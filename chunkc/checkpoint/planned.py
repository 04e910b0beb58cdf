"""Which process saves and loads which parts of which tensors: `torch.distributed.checkpoint`'s planning.

Planning and bytes are apart here. `dcp.save` runs in `Checkpoint.save`, with a writer that notes the plan: which
tensors, or parts of a `DTensor`, this process writes. The bytes follow in the background (`checkpoint.writing`). DCP's
own writers pickle the metadata, build a file in memory before they write it, and know neither checksums nor renaming.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from chunkc.checkpoint.mapped import MappedFile
from chunkc.checkpoint.sources import Source
from chunkc.ir.errors import UnsupportedError

_SEPARATOR = "/"
"""Between the file and the key in the names that DCP plans with."""


def to_write(sources: Sequence[Source]) -> list[Source]:
    """Those that this process writes, in the same order.

    Raises:
        UnsupportedError: there are several processes.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UnsupportedError("checkpoints of several processes are not supported yet; save in one of them")
    writer = _NotingWriter()
    named = {_SEPARATOR.join((source.file, source.key)): source for source in sources}
    if len(named) < len(sources):
        keys = [source.key for source in sources]
        raise UnsupportedError(f"two tensors would be called {next(key for key in keys if keys.count(key) > 1)}")
    like = {name: torch.empty(source.shape, dtype=source.dtype, device="meta") for name, source in named.items()}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _alone():
        dcp.save(like, storage_writer=writer, planner=planner, no_dist=True)
    planned = {item.index.fqn for item in writer.items}
    return [source for name, source in named.items() if name in planned]


def load_into(tensors: Mapping[tuple[str, str], torch.Tensor], files: Mapping[str, MappedFile]) -> None:
    """Fill tensors, given by file and key, in place. What is there and of which shape was checked before."""
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    targets = {_SEPARATOR.join(place): tensor for place, tensor in tensors.items()}
    with _alone():
        dcp.load(targets, storage_reader=_MappedReader(files), planner=planner, no_dist=True)


@contextmanager
def _alone() -> Iterator[None]:
    """Without DCP's warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _NotingWriter(dcp.StorageWriter):
    """Notes what this process is to write."""

    def __init__(self) -> None:
        self.items: list[WriteItem] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.items = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.items = list(plan.items)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return future

    def finish(self, metadata: md.Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # it has no place of its own


class _MappedReader(dcp.StorageReader):
    """Copies from mapped files."""

    def __init__(self, files: Mapping[str, MappedFile]) -> None:
        self._files = files

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> md.Metadata:
        tensors: dict[str, Any] = {}
        for file, mapped in self._files.items():
            for key, entry in mapped.entries.items():
                size = torch.Size(entry.shape)
                whole = md.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
                properties = md.TensorProperties(dtype=entry.dtype)
                tensors[_SEPARATOR.join((file, key))] = md.TensorStorageMetadata(properties, size, [whole])
        return md.Metadata(tensors)

    def set_up_storage_reader(self, metadata: md.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            file, _, key = item.storage_index.fqn.partition(_SEPARATOR)
            source = self._files[file].tensor(key)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # it has no place of its own
