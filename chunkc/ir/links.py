"""Name the links: the routes of bytes between homes and the compute tier, one direction each, each with its own queue.

Between ranks bytes take further links, in both directions at once. Exchanges between ranks have queues of their own,
too.

A copy from a disk goes on through the link to the device, piece by piece, while the next piece is read (see
`chunkc.runtime.storage.staging`); so it is as fast as the slowest part of its route. It has its own queue: copies from
RAM do not wait behind it. The pieces from a disk slow concurrent copies on the device's link; this is left out: on
today's machines it is a quarter of the link's rate or less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

TO_DEVICE, TO_HOME = "to_device", "to_home"
"""Links between pinned RAM, or a memory map, and the compute tier."""

FROM_DISK, TO_DISK = "from_disk", "to_disk"
"""Links between a disk home and the compute tier."""

BETWEEN_DEVICES, BETWEEN_HOSTS = "between_devices", "between_hosts"
"""Links between two devices of a host, and between devices of two hosts: the bytes one device sends, or receives."""

LINKS = (TO_DEVICE, TO_HOME, FROM_DISK, TO_DISK, BETWEEN_DEVICES, BETWEEN_HOSTS)
"""Links that a machine may state a rate for."""

GATHER, SCATTER = "gather", "scatter"
"""Queues between homes and the compute tiers of all ranks: every rank's shard of a chunk to each of them, and the sum
of their gradients back, of which each rank takes its shard home. They pass this rank's link to or from home, and the
links between ranks (see `Hardware.exchange_s`)."""

ROUTES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        TO_DEVICE: (TO_DEVICE,),
        TO_HOME: (TO_HOME,),
        FROM_DISK: (FROM_DISK, TO_DEVICE),
        TO_DISK: (TO_HOME, TO_DISK),
    }
)
"""Queues of copies between this rank's home and its compute tier, and the links that each passes, in order."""

QUEUES = (*ROUTES, GATHER, SCATTER)
"""Names of all queues."""

INWARD = frozenset({TO_DEVICE, FROM_DISK, GATHER})
"""Queues that lead to the compute tier; the rest lead away from it."""


@dataclass(frozen=True)
class LinkSpec:
    """Rate and latency of one link.

    Attributes:
        name: of `LINKS`.
        bytes_per_s: of one large copy while the other links rest.
        latency_s: seconds that every copy takes on top.
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0


def host_links(
    to_device: float, to_home: float, from_disk: float | None = None, to_disk: float | None = None
) -> tuple[LinkSpec, ...]:
    """Make the links between homes and a device from rates in bytes per second, without latencies; None: no link."""
    rates = {TO_DEVICE: to_device, TO_HOME: to_home, FROM_DISK: from_disk, TO_DISK: to_disk}
    return tuple(LinkSpec(name, rate) for name, rate in rates.items() if rate is not None)
