"""Shadow copies for speculative updates: commit swaps them in, roll-back discards them.

Home is unchanged until `commit`, so `roll_back` computes and copies nothing. `commit` swaps home and shadow copy;
parameters and states then have the new values. External views of their memory have to see these, too: there the values
are copied into home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from chunkc.ir.layout import GRAD, Chunk, ChunkLayout
from chunkc.ir.states import num_entries
from chunkc.runtime.storage.arena import Arena


class ShadowCopies:
    """Shadow copies of one model's chunks: of parameters and states, group by group."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._written: dict[int, set[str]] = {}

    def reserve(self, layout: ChunkLayout, groups: Iterable[int]) -> None:
        """Allocate shadow copies of these groups, for all of them or for none.

        Raises:
            HomeError: the home tier has no room.
        """
        wanted = {
            chunk: layout.groups[index].nbytes(kind)
            for index in groups
            for kind in layout.groups[index].update_kinds
            if kind != GRAD and not self._arena.has_shadow_copy(chunk := Chunk(kind, index))
        }
        self._arena.reserve_shadow_copies(wanted)

    def has(self, layout: ChunkLayout, group: int) -> bool:
        """Whether a group has shadow copies of all chunks that an update may write."""
        kinds = layout.groups[group].update_kinds
        return all(kind == GRAD or self._arena.has_shadow_copy(Chunk(kind, group)) for kind in kinds)

    def begin(self, group: int) -> None:
        """Direct write-backs of a group's parameters and states to their shadow copies from now on."""
        self._written[group] = set()

    def takes(self, chunk: Chunk) -> bool:
        """Whether write-backs of a chunk go to its shadow copy."""
        return chunk.kind != GRAD and chunk.group in self._written

    def writer(self, chunk: Chunk, offset_nbytes: int, buffer: torch.Tensor) -> Callable[[], None]:
        """Make a job that writes `buffer` into a chunk's shadow copy from `offset_nbytes`."""
        self._written[chunk.group].add(chunk.kind)
        return self._arena.writer(chunk, offset_nbytes, buffer, shadow=True)

    def flat(self, layout: ChunkLayout, group: int, kinds: Iterable[str]) -> dict[str, torch.Tensor]:
        """View a group's shadow copies of some kinds as flat CPU tensors; the caller's update writes all elements."""
        chunk_group = layout.groups[group]
        flat = {}
        for kind in kinds:
            self._written[group].add(kind)
            chunk, numel = Chunk(kind, group), num_entries(kind, chunk_group.numel)
            flat[kind] = self._arena.host_view(chunk, chunk_group.kind_dtype(kind), numel, shadow=True)
        return flat

    def roll_back(self, group: int) -> None:
        """Discard a group's update, after its last write: home is as it was before."""
        self._written.pop(group, None)

    def written(self, group: int) -> frozenset[str]:
        """Return the kinds of data that a group's update has written."""
        return frozenset(self._written.get(group, ()))

    def commit(self, layout: ChunkLayout, group: int, *, copied: Iterable[str]) -> None:
        """Make a group's update the home data.

        Args:
            copied: kinds of data to copy instead of swap, since there are external views of their home. All copies of
                these chunks must be over.
        """
        chunk_group, copied = layout.groups[group], frozenset(copied)
        for kind in sorted(self._written.pop(group)):
            chunk = Chunk(kind, group)
            if kind in copied:
                extent = chunk_group.kind_dtype(kind), num_entries(kind, chunk_group.numel)
                self._arena.host_view(chunk, *extent).copy_(self._arena.host_view(chunk, *extent, shadow=True))
            else:
                self._arena.swap(chunk)
