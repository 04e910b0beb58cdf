"""Describe a machine for the planner and `explain`: rates of arithmetic, of each memory and of each link.

A machine is one host, or several equal hosts, with equal devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import isfinite
from typing import Literal, Self

import torch

from chunkc.ir.collectives import collective_s
from chunkc.ir.errors import OptionsError
from chunkc.ir.links import (
    BETWEEN_DEVICES,
    BETWEEN_HOSTS,
    FROM_DISK,
    GATHER,
    LINKS,
    ROUTES,
    SCATTER,
    TO_DEVICE,
    TO_DISK,
    TO_HOME,
    LinkSpec,
    host_links,
)

GIB = 1 << 30

PAGE_TABLE_NBYTES_PER_GIB = 8 * GIB // 4096
"""Page table bytes of a device for each GiB of host memory mapped in pages of 4 KiB: an entry is 8 bytes."""

THROUGH_RAM = "through_ram"
"""Route between devices without a link to each other: the links of both to RAM."""


@dataclass(frozen=True)
class Hardware:
    """Sizes and achievable rates of one machine. They decide what is worth doing, never whether a plan is right.

    Every figure is what programs reach, not what a datasheet promises. Rates, memories and links of the device are
    those of one device; `host_memory_nbytes`, `cpu_update_bytes_per_s` and the disk's links are those of one host,
    which its devices share.

    Units: operations per second, bytes per second, seconds, bytes. None: not stated.

    Attributes:
        flops_per_s: matrix products in the training dtype, if a plan needs a single figure.
        memory_bytes_per_s: sum of reads and writes of the compute tier's memory.
        links: each direction by itself; `to_device` and `to_home` must be among them. The disk's are of the medium
            behind a disk home, without the page cache; without them a disk is as fast as RAM. Those between devices and
            between hosts are of one device, each direction while both run.
        name: a preset's name, or the user's.
        kind: whether the compute tier is a CUDA device's memory or RAM.
        num_devices: equal devices that compute, on all hosts in total.
        num_hosts: equal hosts of these devices; the last one may have fewer devices.
        device_memory_nbytes: of one device, as PyTorch reports its total; on a CPU, of RAM.
        context_nbytes: the part of `device_memory_nbytes` that the driver's context and libraries take before the first
            tensor, and in training's first step as kernels are loaded; 0 on a CPU.
        page_table_nbytes_per_gib: the part of `device_memory_nbytes` that the driver's page tables take for each GiB of
            host memory that is mapped for the device; None: as for pages of 4 KiB.
        fp32_flops_per_s, tf32_flops_per_s, bf16_flops_per_s, fp16_flops_per_s: matrix products by dtype (tf32: of fp32
            tensors, in tf32); None if the device has no unit for it.
        both_links_bytes_per_s: sum over `to_device` and `to_home` while both run; None: neither slows the other.
        host_memory_nbytes: RAM of each host.
        cpu_update_bytes_per_s: memory traffic of optimizer updates on the CPU, all cores.
        capability: compute capability of a CUDA device, major and minor, which decides some of its kernels; None: not
            known.
        source: of the figures.
        num_copies: replicas of every shard of a model that is sharded over its devices (see `chunkc.ir.shards`).
        devices_per_layer: neighbouring devices that compute each layer collectively (tensor parallelism).
    """

    flops_per_s: float
    memory_bytes_per_s: float
    links: tuple[LinkSpec, ...]
    name: str = "custom"
    kind: Literal["cpu", "cuda"] = "cpu"
    num_devices: int = 1
    num_hosts: int = 1
    device_memory_nbytes: int | None = None
    context_nbytes: int = 0
    page_table_nbytes_per_gib: int | None = None
    fp32_flops_per_s: float | None = None
    tf32_flops_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    fp16_flops_per_s: float | None = None
    both_links_bytes_per_s: float | None = None
    host_memory_nbytes: int | None = None
    cpu_update_bytes_per_s: float | None = None
    capability: tuple[int, int] | None = None
    source: str = ""
    num_copies: int = 1
    devices_per_layer: int = 1

    def __post_init__(self) -> None:
        """Raise OptionsError if a figure is impossible: not positive, or a context larger than its memory."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("context_nbytes", "page_table_nbytes_per_gib"):
                if value is not None and value < 0:
                    raise OptionsError(f"hardware {self.name!r}: {field.name} is {value}; it must not be negative")
            elif isinstance(value, int | float) and not 0 < value < float("inf"):
                raise OptionsError(f"hardware {self.name!r}: {field.name} is {value}; it must be positive and finite")
        self._check_links()
        if self.num_hosts > self.num_devices:
            raise OptionsError(
                f"hardware {self.name!r}: {self.num_hosts} hosts cannot share {self.num_devices} devices"
            )
        if (num_devices := self.num_devices) % (per_layer := self.devices_per_layer):
            raise OptionsError(f"hardware {self.name!r}: layers of {per_layer} devices do not divide {num_devices}")
        if self.device_memory_nbytes is not None and self.context_nbytes >= self.device_memory_nbytes:
            raise OptionsError(f"hardware {self.name!r}: context_nbytes leaves nothing of device_memory_nbytes")

    def _check_links(self) -> None:
        names = Counter(link.name for link in self.links)
        for link in self.links:
            what = f"hardware {self.name!r}: link {link.name!r}"
            if link.name not in LINKS:
                raise OptionsError(f"{what} is not known; there are {', '.join(LINKS)}")
            if names[link.name] > 1:
                raise OptionsError(f"{what} is listed {names[link.name]} times")
            if not (link.bytes_per_s > 0 and isfinite(link.bytes_per_s)):
                raise OptionsError(f"{what}: bytes_per_s is {link.bytes_per_s}; it must be positive and finite")
            if not (link.latency_s >= 0 and isfinite(link.latency_s)):
                raise OptionsError(f"{what}: latency_s is {link.latency_s}; it must be finite and not negative")
        if missing := [name for name in (TO_DEVICE, TO_HOME) if name not in names]:
            raise OptionsError(f"hardware {self.name!r} lists no link {' and no link '.join(missing)}")

    def link(self, name: str) -> LinkSpec | None:
        """Return the link of that name; None if the machine does not state it."""
        return next((link for link in self.links if link.name == name), None)

    def copy_s(self, link: str, nbytes: float) -> float:
        """Return the seconds of one copy at the slowest rate of its route, while all other links rest.

        An exchange with other ranks (`GATHER`, `SCATTER`) takes `exchange_s`.
        """
        if link in (GATHER, SCATTER):
            return self.exchange_s(link, nbytes)
        latency_s, bytes_per_s = self._routes[link]
        return latency_s + nbytes / bytes_per_s

    @cached_property
    def _routes(self) -> Mapping[str, tuple[float, float]]:
        """Queue -> total latency and slowest rate of its route."""
        routes = {}
        for queue, names in ROUTES.items():
            if route := [spec for name in names if (spec := self._shared(name)) is not None]:
                routes[queue] = sum(spec.latency_s for spec in route), min(spec.bytes_per_s for spec in route)
        return routes

    def _shared(self, name: str) -> LinkSpec | None:
        """Return a device's fraction of a link while all devices use theirs: the devices of a host share its disk."""
        link = self.link(name)
        if link is None or name not in (FROM_DISK, TO_DISK):
            return link
        return replace(link, bytes_per_s=link.bytes_per_s / self.devices_per_host)

    def exchange_s(self, queue: str, nbytes: float) -> float:
        """Return the seconds of an exchange of a chunk between ranks, one on each device, while the other links rest.

        A gather brings each rank's shard from its home, by its own link, and then all shards to every rank; a scatter
        does the same the other way. Homes on a disk count as RAM: they are read and written through the page cache.

        Args:
            queue: `GATHER` or `SCATTER`.
            nbytes: of the shards of all ranks.
        """
        if not nbytes:
            return 0.0
        way, part_nbytes = self.between_ranks, nbytes / self.devices_per_row
        row = self._inside_hosts if self.num_copies >= self.num_hosts else way
        own_s = self.copy_s(TO_DEVICE if queue == GATHER else TO_HOME, part_nbytes)
        row_s = collective_s(nbytes, self.devices_per_row, row.bytes_per_s, row.latency_s)
        if queue == GATHER:
            return own_s + row_s
        return own_s + row_s + 2 * collective_s(part_nbytes, self.num_copies, way.bytes_per_s, way.latency_s)

    def carried_nbytes(self, queue: str, nbytes: int) -> dict[str, int]:
        """Return the bytes that each link carries for one copy or exchange, of the device that carries most.

        In an exchange a device sends, and receives, the bytes of its ring. Of devices on several hosts, those with a
        neighbour on another host send to it `BETWEEN_HOSTS`, and the other devices `BETWEEN_DEVICES` or through RAM.
        """
        if queue not in (GATHER, SCATTER):
            return dict.fromkeys(ROUTES[queue], nbytes)
        others = nbytes * (self.devices_per_row - 1) // self.devices_per_row
        own = nbytes - others
        carried, inside = Counter({TO_DEVICE if queue == GATHER else TO_HOME: own}), self._links_inside
        if self.devices_per_host > self.devices_per_layer and self.devices_per_row > 1:
            carried.update(dict.fromkeys(inside, others))
        if self.num_hosts > self.num_copies:
            carried[BETWEEN_HOSTS] += others
        if queue == SCATTER and self.num_copies > 1:  # an all-reduce of this shard between its copies
            between = (BETWEEN_HOSTS,) if self.num_hosts > 1 else inside
            carried.update(dict.fromkeys(between, 2 * own * (self.num_copies - 1) // self.num_copies))
        return dict(carried)

    def carried_in_layers(self, nbytes: int) -> dict[str, int]:
        """Return the bytes by link that a device sends to the devices that compute its layers with it.

        As in `carried_nbytes`, these are the bytes of the device that carries most.
        """
        hosts = () if self._is_layer_inside else (BETWEEN_HOSTS,)
        return dict.fromkeys((*self._links_inside, *hosts) if self.devices_per_host > 1 else hosts, nbytes)

    @property
    def _links_inside(self) -> tuple[str, ...]:
        return (TO_DEVICE, TO_HOME) if self.link(BETWEEN_DEVICES) is None else (BETWEEN_DEVICES,)

    @property
    def _is_layer_inside(self) -> bool:
        return self.devices_per_host % self.devices_per_layer == 0

    @property
    def devices_per_row(self) -> int:
        """Number of devices that hold one full set of shards; with tensor parallelism, of one tensor-parallel shard."""
        return self.num_devices // (self.num_copies * self.devices_per_layer)

    @property
    def between_devices_of_a_layer(self) -> LinkSpec:
        """Link between devices that compute a layer collectively, as `between_ranks`: inside a host if they are on one.

        Raises:
            OptionsError: they are on several hosts, and no link between hosts is stated.
        """
        return self._inside_hosts if self._is_layer_inside else self.between_ranks

    @property
    def between_ranks(self) -> LinkSpec:
        """Slowest link between two neighbours of a ring over all devices.

        Devices without a link to each other exchange through RAM, and their links to it send and receive at once.

        Raises:
            OptionsError: there are several hosts, and no link between them is stated.
        """
        inside = self._inside_hosts
        if self.num_hosts == 1:
            return inside
        outside = self.link(BETWEEN_HOSTS)
        if outside is None:
            raise OptionsError(
                f"hardware {self.name!r} does not say the link {BETWEEN_HOSTS!r}, by which hosts exchange"
            )
        slower = min(inside, outside, key=lambda link: link.bytes_per_s)
        return replace(slower, latency_s=max(inside.latency_s, outside.latency_s))

    @property
    def _inside_hosts(self) -> LinkSpec:
        """Link between two neighbours on one host."""
        inside = self.link(BETWEEN_DEVICES)
        if inside is None:
            out, back = (spec for spec in self.links if spec.name in (TO_HOME, TO_DEVICE))
            both = self.both_links_bytes_per_s or out.bytes_per_s + back.bytes_per_s
            slowdown = min(1.0, both / (out.bytes_per_s + back.bytes_per_s))
            inside = LinkSpec(
                THROUGH_RAM, slowdown * min(out.bytes_per_s, back.bytes_per_s), out.latency_s + back.latency_s
            )
        return inside

    @property
    def usable_memory_nbytes(self) -> int | None:
        """Bytes for tensors on one device: its memory without the context. None: not stated."""
        return None if self.device_memory_nbytes is None else self.device_memory_nbytes - self.context_nbytes

    def page_table_nbytes(self, mapped_nbytes: int) -> int:
        """Return the bytes of one device's page tables for `mapped_nbytes` of host memory mapped for it."""
        if self.kind != "cuda":
            return 0
        per_gib = self.page_table_nbytes_per_gib
        return -(-mapped_nbytes * (PAGE_TABLE_NBYTES_PER_GIB if per_gib is None else per_gib) // GIB)

    @property
    def automatic_memory_nbytes(self) -> int | None:
        """Bytes for tensors on one device if its host has all of its memory mapped; None: not stated."""
        usable_nbytes = self.usable_memory_nbytes
        if usable_nbytes is None:
            return None
        mapped_nbytes = (self.host_memory_nbytes or 0) // self.devices_per_host
        return max(0, usable_nbytes - self.page_table_nbytes(mapped_nbytes))

    @property
    def update_bytes_per_s(self) -> float:
        """Memory traffic of one device's optimizer updates on the compute tier: a GPU's memory, or the CPU's cores."""
        if self.kind == "cuda" or self.cpu_update_bytes_per_s is None:
            return self.memory_bytes_per_s
        return self.cpu_update_bytes_per_s / self.devices_per_host

    @property
    def home_read_rates(self) -> tuple[float, float]:
        """Bytes per second at which one device and its share of the CPU read homes at once.

        A device reads over its link. Both read the same RAM, which gives the CPU what the link leaves. Where the CPU
        computes, it alone reads.
        """
        if self.kind != "cuda":
            return self.update_bytes_per_s, 0.0
        link = next(link.bytes_per_s for link in self.links if link.name == TO_DEVICE)
        return link, max(0.0, (self.cpu_update_bytes_per_s or 0.0) / self.devices_per_host - link)

    @property
    def devices_per_host(self) -> int:
        """Number of devices of a host; the last host has fewer if hosts cannot share them evenly."""
        return -(-self.num_devices // self.num_hosts)

    def matrix_flops_per_s(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Return the rate of matrix products in `dtype`.

        A dtype that the device has no unit for is computed in fp32; if fp32 is not stated either, and for any other
        dtype, the answer is `flops_per_s`.

        Args:
            tf32: whether fp32 products may round their inputs to tf32 (`torch.backends.cuda.matmul`).
        """
        fp32 = self.fp32_flops_per_s or self.flops_per_s
        if dtype == torch.float32:
            return (self.tf32_flops_per_s or fp32) if tf32 else fp32
        if dtype == torch.bfloat16:
            return self.bf16_flops_per_s or fp32
        if dtype == torch.float16:
            return self.fp16_flops_per_s or fp32
        return self.flops_per_s

    def training_in(self, dtype: torch.dtype) -> Self:
        """Return the machine with `flops_per_s` for `dtype`, to plan a model in that dtype."""
        return replace(self, flops_per_s=self.matrix_flops_per_s(dtype))

    def link_seconds(self, nbytes: Mapping[str, float]) -> float:
        """Return the seconds to copy these amounts, by link, if all links start at once and run while they have work.

        While both run, `to_device` and `to_home` share `both_links_bytes_per_s` in proportion to their single rates,
        and neither runs faster than alone; when one is done the other has all of it. They also carry the bytes from and
        to the disk. Latencies are left out.
        """
        carried: Counter[str] = Counter()
        for name, amount in nbytes.items():
            for passed in ROUTES[name]:
                carried[passed] += amount  # type: ignore[assignment]
        rates = {link.name: link.bytes_per_s for link in self.links}
        both, inwards, outwards = self.both_links_bytes_per_s, rates.pop(TO_DEVICE), rates.pop(TO_HOME)
        slowdown = 1.0 if both is None else min(1.0, both / (inwards + outwards))
        alone = sorted((carried[TO_DEVICE] / inwards, carried[TO_HOME] / outwards))
        disks = (carried[name] * self.devices_per_host / rates[name] for name in (FROM_DISK, TO_DISK) if name in rates)
        return max(alone[0] / slowdown + (alone[1] - alone[0]), *disks, 0.0)

    def over(self, base: Self) -> Self:
        """Return the machine with the base's figures and links where it states none itself."""
        stated = {link.name for link in self.links}
        links = (*self.links, *(link for link in base.links if link.name not in stated))
        missing = [field.name for field in fields(self) if getattr(self, field.name) is None]
        return replace(self, links=links, **{name: getattr(base, name) for name in missing})

    def times(self, count: int) -> Self:
        """Return hosts with `count` times as many such devices, and as much more RAM, cores and disks.

        Raises:
            OptionsError: `count` is not positive.
        """
        if count < 1:
            raise OptionsError(f"a machine has at least one device, not {count}")
        if count == 1:
            return self
        shared = {
            name: getattr(self, name) * count
            for name in ("host_memory_nbytes", "cpu_update_bytes_per_s")
            if getattr(self, name) is not None
        }
        links = tuple(
            replace(link, bytes_per_s=link.bytes_per_s * count) if link.name in (FROM_DISK, TO_DISK) else link
            for link in self.links
        )
        name = f"{count}x{self.name}"
        return replace(self, name=name, num_devices=self.num_devices * count, links=links, **shared)

    def on_hosts(self, count: int) -> Self:
        """Return `count` times as many such hosts.

        Raises:
            OptionsError: `count` is not positive.
        """
        if count < 1:
            raise OptionsError(f"a machine has at least one host, not {count}")
        if count == 1:
            return self
        name, num_devices = f"{count}x{self.name}", self.num_devices * count
        return replace(self, name=name, num_devices=num_devices, num_hosts=self.num_hosts * count)

    def used_by(
        self, num_ranks: int, num_hosts: int | None = None, num_copies: int = 1, devices_per_layer: int = 1
    ) -> Self:
        """Return the part of the machine that the ranks of one model use.

        On GPUs each rank has its own device. A CPU's ranks are processes that share its hosts, however many.

        Args:
            num_hosts: over which ranks are spread evenly; None: no more hosts than they need, each with all its
                devices.
            num_copies, devices_per_layer: see `Hardware`.

        Raises:
            OptionsError: there are no such devices or hosts.
        """
        if num_ranks < 1 or (num_hosts is not None and not 1 <= num_hosts <= num_ranks):
            raise OptionsError(
                f"{num_ranks} ranks on {num_hosts or 1} hosts: a model has at least one rank on each host"
            )
        hosts = num_hosts or -(-num_ranks // self.devices_per_host)
        if self.kind == "cpu":
            hosts = num_hosts or min(self.num_hosts, num_ranks)
        elif hosts > self.num_hosts or -(-num_ranks // hosts) > self.devices_per_host:
            where = f" on {num_hosts} hosts" if num_hosts else ""
            has = f"{self.num_hosts} of {self.devices_per_host} devices each"
            raise OptionsError(f"{num_ranks} ranks{where} need a device each; the hosts of {self.name} are {has}")
        return replace(
            self, num_devices=num_ranks, num_hosts=hosts, num_copies=num_copies, devices_per_layer=devices_per_layer
        )


CPU = Hardware(
    name="cpu",
    kind="cpu",
    flops_per_s=1.0e11,
    memory_bytes_per_s=1.5e10,
    links=(
        *host_links(2.0e9, 1.5e9, from_disk=2.0e9, to_disk=1.5e9),
        LinkSpec(BETWEEN_DEVICES, 1.0e9, 1.0e-4),
        LinkSpec(BETWEEN_HOSTS, 1.0e8, 2.0e-4),
    ),
    fp32_flops_per_s=1.0e11,
    both_links_bytes_per_s=2.5e9,
    device_memory_nbytes=32 * GIB,
    host_memory_nbytes=32 * GIB,
    cpu_update_bytes_per_s=1.5e10,
    source="cautious round figures: a few cores, 32 GiB, a disk behind the page cache",
)
"""A few cores with a disk behind the page cache: cautious round figures."""
