"""Time updates: one clock for plans, for their search, for where groups are updated, and for `explain`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import Chunk, ChunkGroup, ChunkLayout
from chunkc.ir.links import TO_DEVICE, TO_HOME
from chunkc.ir.plan import Tile
from chunkc.ir.updates import tile_traffic, update_stages, update_traffic

LinksOf = Callable[[str], tuple[str, str]]
"""Kind of data -> the links by which its chunks come to the compute tier, and go home."""


def group_update_nbytes(group: ChunkGroup, num_stages: int = 1) -> int:
    """Return the bytes that the update of a whole group reads and writes where it runs."""
    return sum(stage.nbytes for stage in update_traffic(group.dtype, group.states, group.numel, num_stages))


def traffic_s(nbytes: int, hardware: Hardware) -> float:
    """Return the seconds in which updates read and write so many bytes on the compute tier."""
    return nbytes / hardware.update_bytes_per_s


def arithmetic_s(groups: Iterable[ChunkGroup], hardware: Hardware, num_stages: int = 1) -> float:
    """Return the seconds to update whole groups that are on the compute tier."""
    return traffic_s(sum(group_update_nbytes(group, num_stages) for group in groups), hardware)


def tile_s(group: ChunkGroup, tile: Tile, hardware: Hardware) -> float:
    """Return the seconds to update a tile of a group that is on the compute tier."""
    return traffic_s(tile_traffic(group, tile).nbytes, hardware)


def cpu_update_s(groups: Iterable[ChunkGroup], hardware: Hardware, num_stages: int = 1) -> float | None:
    """Return the seconds that the CPU takes to update the groups in place; None if its rate is not stated."""
    if hardware.cpu_update_bytes_per_s is None:
        return None
    nbytes = sum(group_update_nbytes(group, num_stages) for group in groups)
    return nbytes / (hardware.cpu_update_bytes_per_s / hardware.devices_per_host)


def _host_links(_: str) -> tuple[str, str]:
    return TO_DEVICE, TO_HOME


def update_seconds(
    groups: Sequence[ChunkGroup],
    hardware: Hardware,
    num_stages: int = 1,
    *,
    links_of: LinksOf = _host_links,
    latencies: bool = False,
) -> float:
    """Return the seconds to update groups in slots: of the copies of all stages, or of the arithmetic if it is longer.

    Args:
        links_of: of a layout; without one, homes are in RAM.
        latencies: count those of copies of whole chunks, one after the other on each link, as if no link slowed
            another; else directions share what both can carry (see `Hardware.link_seconds`).
    """
    copies = [copy for group in groups for copy in _copies(group.update_kinds, num_stages, group.nbytes, links_of)]
    if latencies:
        links_s = max(_by_link((link, hardware.copy_s(link, nbytes)) for link, nbytes in copies).values(), default=0.0)
    else:
        links_s = hardware.link_seconds(_by_link(copies))
    return max(arithmetic_s(groups, hardware, num_stages), links_s)


def pace_s(layout: ChunkLayout, tile: Tile, hardware: Hardware) -> float:
    """Return the seconds from one tile to the next: the memory reads and writes it, links bring one and take one away.

    By its memory's time alone, tiles behind a slow link would be fetched all at once: they would fill the budget, and
    none would come sooner. Of two stages each has half of the link's time: the second may find its chunks in slots.
    """
    group, part = layout.groups[tile.group], (tile.begin, tile.end)

    def nbytes_of(kind: str) -> int:
        return group.slot_nbytes(Chunk(kind, tile.group, part))

    copies = _copies(group.update_kinds, 1, nbytes_of, layout.links_of)
    return max(tile_s(group, tile, hardware), hardware.link_seconds(_by_link(copies)) / tile.num_stages)


def _copies(
    kinds: tuple[str, ...], num_stages: int, nbytes_of: Callable[[str], int], links_of: LinksOf
) -> Iterator[tuple[str, int]]:
    """Yield (link, bytes) for each copy of an update of which no stage finds what an earlier one has left in slots."""
    for stage in update_stages(kinds, num_stages):
        yield from ((links_of(kind)[0], nbytes_of(kind)) for kind in stage.kinds)
        yield from ((links_of(kind)[1], nbytes_of(kind)) for kind in stage.writes)


def _by_link(amounts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sum up amounts by link."""
    total: dict[str, float] = {}
    for link, amount in amounts:
        total[link] = total.get(link, 0) + amount
    return total
