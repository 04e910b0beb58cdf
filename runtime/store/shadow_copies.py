"""Second homes of chunks, where updates are written that may yet be undone.

Home is as it was until `adopt`, so undoing is `drop`: nothing is computed or copied for it. `adopt` lets home and twin
change places; whoever has the parameter, or one of its states, finds the new values in it. Where somebody has views of
their memory besides, these have to see them, too: there the values are copied into home.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from chunkc.ir.layout import GRAD, Chunk, ChunkLayout
from chunkc.ir.states import num_entries
from chunkc.runtime.storage.arena import Arena


class ShadowCopies:
    """The twins of one model's chunks: of parameters and states, group by group."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._written: dict[int, set[str]] = {}

    def reserve(self, layout: ChunkLayout, groups: Iterable[int]) -> None:
        """Room for twins of these groups, for all of them or for none.

        Raises:
            HomeError: the home tier has none.
        """
        wanted = {
            chunk: layout.groups[index].nbytes(kind)
            for index in groups
            for kind in layout.groups[index].update_kinds
            if kind != GRAD and not self._arena.has_shadow_copy(chunk := Chunk(kind, index))
        }
        self._arena.reserve_shadow_copies(wanted)

    def has(self, layout: ChunkLayout, group: int) -> bool:
        """Whether a group has twins of all that an update may write."""
        kinds = layout.groups[group].update_kinds
        return all(kind == GRAD or self._arena.has_shadow_copy(Chunk(kind, group)) for kind in kinds)

    def begin(self, group: int) -> None:
        """From now on, what leaves slots of a group's parameters and states goes to their twins."""
        self._written[group] = set()

    def takes(self, chunk: Chunk) -> bool:
        """Whether what leaves a chunk's slot goes to its twin."""
        return chunk.kind != GRAD and chunk.group in self._written

    def writer(self, chunk: Chunk, offset_nbytes: int, buffer: torch.Tensor) -> Callable[[], None]:
        """A job that writes `buffer` into a chunk's twin from `offset_nbytes`."""
        self._written[chunk.group].add(chunk.kind)
        return self._arena.writer(chunk, offset_nbytes, buffer, shadow=True)

    def flat(self, layout: ChunkLayout, group: int, kinds: Iterable[str]) -> dict[str, torch.Tensor]:
        """A group's twins of some kinds as flat CPU tensors, for an update by the CPU to write all of them."""
        of_group = layout.groups[group]
        found = {}
        for kind in kinds:
            self._written[group].add(kind)
            chunk, numel = Chunk(kind, group), num_entries(kind, of_group.numel)
            found[kind] = self._arena.host_view(chunk, of_group.kind_dtype(kind), numel, shadow=True)
        return found

    def drop(self, group: int) -> None:
        """The update of a group is undone, once nobody writes it any more: home is as it was before it."""
        self._written.pop(group, None)

    def written(self, group: int) -> frozenset[str]:
        """The kinds of data that the update of a group has written."""
        return frozenset(self._written.get(group, ()))

    def adopt(self, layout: ChunkLayout, group: int, *, copied: Iterable[str]) -> None:
        """The update of a group stands: what it wrote is at home from now on.

        Args:
            copied: kinds of data whose home keeps its place, since somebody has views of it. For these, all copies have
                to be over.
        """
        of_group, copied = layout.groups[group], frozenset(copied)
        for kind in sorted(self._written.pop(group)):
            chunk = Chunk(kind, group)
            if kind in copied:
                extent = of_group.kind_dtype(kind), num_entries(kind, of_group.numel)
                self._arena.host_view(chunk, *extent).copy_(self._arena.host_view(chunk, *extent, shadow=True))
            else:
                self._arena.swap(chunk)
