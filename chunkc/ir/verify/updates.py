"""Record the updated elements of each group for the verifier."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from chunkc.ir.layout import GRAD, ChunkLayout
from chunkc.ir.updates import update_stages


class UpdatedGroups:
    """Tiles of each group's update so far, by stage.

    Attributes:
        undoable: groups with updates that consume no gradients.
    """

    def __init__(self, layout: ChunkLayout) -> None:
        self._layout = layout
        self.undoable: Collection[int] = ()
        self._tiles: dict[int, list[list[tuple[int, int]]]] = {}

    def __contains__(self, group: object) -> bool:
        """Whether the group's update has begun."""
        return group in self._tiles

    def add(self, group: int, part: tuple[int, int], stage: int, num_stages: int) -> bool:
        """Record an updated tile; return whether the stages before its own are done."""
        done = self._tiles.setdefault(group, [[] for _ in range(num_stages)])
        done[stage].append(part)
        return all(self._is_whole(group, tiles) for tiles in done[:stage])

    def has_consumed_gradients(self, group: int) -> bool:
        """Whether the group's update has fully consumed its gradients."""
        if group in self.undoable:
            return False
        done = self._tiles.get(group, [[]])
        kinds = self._layout.groups[group].update_kinds
        return all(
            self._is_whole(group, tiles)
            for tiles, stage in zip(done, update_stages(kinds, len(done)))
            if GRAD in stage.kinds
        )

    def wrong(self, wanted: Collection[int]) -> Iterator[str]:
        """Yield a violation for each group that differs from the `wanted` updates: every element once in each stage."""
        for group in sorted({*self._tiles, *wanted}):
            for tiles in map(sorted, self._tiles.get(group, [[]])):
                ends = [0, *(end for _, end in tiles)]
                is_whole = [begin for begin, _ in tiles] == ends[:-1] and ends[-1] == self._layout.groups[group].numel
                if not is_whole or group not in wanted:
                    yield f"the updates of group {group} cover {tiles}"

    def _is_whole(self, group: int, tiles: Collection[tuple[int, int]]) -> bool:
        return sum(end - begin for begin, end in tiles) >= self._layout.groups[group].numel
