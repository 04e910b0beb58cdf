"""The machine as the planner and `explain` see it: what arithmetic, each memory and each link can do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Literal, Self

import torch

from chunkc.ir.errors import OptionsError
from chunkc.ir.links import FROM_DISK, ROUTES, TO_DEVICE, TO_DISK, TO_HOME, LinkSpec, host_links

GIB = 1 << 30


@dataclass(frozen=True)
class Hardware:
    """Sizes and achievable rates of one machine. They decide what is worth doing, never whether a plan is right.

    Everything here is what programs reach, not what a datasheet promises. Rates, memories and links of the
    device are those of one device; `host_memory_nbytes`, `cpu_update_bytes_per_s` and the disk's links are those
    of the whole machine, which its devices share.

    Units: operations per second, bytes per second, seconds, bytes. None: not stated.

    Attributes:
        flops_per_s: matrix products in the dtype one trains in, where a plan needs a single figure.
        memory_bytes_per_s: reads and writes of the compute tier's memory together.
        links: each direction by itself; `to_device` and `to_home` must be among them. The disk's are of the medium
            behind a disk home, without the page cache; without them a disk is as fast as RAM.
        name: a preset's name, or what the user calls it.
        kind: whether the compute tier is a CUDA device's memory or RAM.
        num_devices: devices that compute, all alike.
        device_memory_nbytes: of one device, as PyTorch reports its total; on a CPU, of RAM.
        context_nbytes: the part of `device_memory_nbytes` that the driver's context and libraries take before
            the first tensor; 0 on a CPU.
        fp32_flops_per_s, tf32_flops_per_s, bf16_flops_per_s, fp16_flops_per_s: matrix products by dtype (tf32: of
            fp32 tensors, in tf32); None where the device has no unit for it.
        both_links_bytes_per_s: `to_device` and `to_home` together while both run; None: one does not slow the other.
        host_memory_nbytes: RAM of the machine.
        cpu_update_bytes_per_s: memory traffic of optimizer updates on the CPU, all cores.
        capability: compute capability of a CUDA device, major and minor, which decides some of its kernels; None: not
            known.
        source: where the figures come from.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    links: tuple[LinkSpec, ...]
    name: str = "custom"
    kind: Literal["cpu", "cuda"] = "cpu"
    num_devices: int = 1
    device_memory_nbytes: int | None = None
    context_nbytes: int = 0
    fp32_flops_per_s: float | None = None
    tf32_flops_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    fp16_flops_per_s: float | None = None
    both_links_bytes_per_s: float | None = None
    host_memory_nbytes: int | None = None
    cpu_update_bytes_per_s: float | None = None
    capability: tuple[int, int] | None = None
    source: str = ""

    def __post_init__(self) -> None:
        """Raises OptionsError where a figure makes no sense: not positive, or a context larger than its memory."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "context_nbytes":
                if value < 0:
                    raise OptionsError(f"hardware {self.name!r}: context_nbytes is {value}; it must not be negative")
            elif isinstance(value, int | float) and not 0 < value < float("inf"):
                raise OptionsError(f"hardware {self.name!r}: {field.name} is {value}; it must be positive and finite")
        self._check_links()
        if self.device_memory_nbytes is not None and self.context_nbytes >= self.device_memory_nbytes:
            raise OptionsError(f"hardware {self.name!r}: context_nbytes leaves nothing of device_memory_nbytes")

    def _check_links(self) -> None:
        names = Counter(link.name for link in self.links)
        for link in self.links:
            what = f"hardware {self.name!r}: link {link.name!r}"
            if link.name not in ROUTES:
                raise OptionsError(f"{what} is not known; there are {', '.join(ROUTES)}")
            if names[link.name] > 1:
                raise OptionsError(f"{what} is listed {names[link.name]} times")
            if not (link.bytes_per_s > 0 and isfinite(link.bytes_per_s)):
                raise OptionsError(f"{what}: bytes_per_s is {link.bytes_per_s}; it must be positive and finite")
            if not (link.latency_s >= 0 and isfinite(link.latency_s)):
                raise OptionsError(f"{what}: latency_s is {link.latency_s}; it must be finite and not negative")
        if missing := [name for name in (TO_DEVICE, TO_HOME) if name not in names]:
            raise OptionsError(f"hardware {self.name!r} lists no link {' and no link '.join(missing)}")

    def link(self, name: str) -> LinkSpec | None:
        """The link of that name; None where the machine states nothing of it."""
        return next((link for link in self.links if link.name == name), None)

    def copy_s(self, link: str, nbytes: float) -> float:
        """Seconds of one copy that queues on a link, while all else rests: at the slowest rate of its route."""
        route = [spec for name in ROUTES[link] if (spec := self.link(name)) is not None]
        return sum(spec.latency_s for spec in route) + nbytes / min(spec.bytes_per_s for spec in route)

    @property
    def usable_memory_nbytes(self) -> int | None:
        """What tensors may take on one device: its memory without the context. None: not stated."""
        return None if self.device_memory_nbytes is None else self.device_memory_nbytes - self.context_nbytes

    @property
    def update_bytes_per_s(self) -> float:
        """Memory traffic of one device's optimizer updates on the compute tier: a GPU's memory, or the CPU's cores."""
        if self.kind == "cuda" or self.cpu_update_bytes_per_s is None:
            return self.memory_bytes_per_s
        return self.cpu_update_bytes_per_s / self.num_devices

    def matrix_flops_per_s(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """The rate of matrix products in `dtype`.

        A dtype that the device has no unit for is computed in fp32; where fp32 is not stated either, and for any
        other dtype, the answer is `flops_per_s`.

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
        """The same machine with `flops_per_s` for `dtype`, for a plan of a model in that dtype."""
        return replace(self, flops_per_s=self.matrix_flops_per_s(dtype))

    def link_seconds(self, nbytes: Mapping[str, float]) -> float:
        """Seconds to copy these amounts, by link, when all links start at once and go on while they have work.

        While both run, `to_device` and `to_home` share `both_links_bytes_per_s` in proportion to their single rates,
        and none runs faster than alone; when one is done the other has all of it. They also carry what comes from the
        disk and goes to it. Latencies are left out.
        """
        carried: Counter[str] = Counter()
        for name, amount in nbytes.items():
            for passed in ROUTES[name]:
                carried[passed] += amount  # type: ignore[assignment]
        rates = {link.name: link.bytes_per_s for link in self.links}
        together, inwards, outwards = self.both_links_bytes_per_s, rates.pop(TO_DEVICE), rates.pop(TO_HOME)
        slowdown = 1.0 if together is None else min(1.0, together / (inwards + outwards))
        alone = sorted((carried[TO_DEVICE] / inwards, carried[TO_HOME] / outwards))
        return max(alone[0] / slowdown + (alone[1] - alone[0]), *(carried[name] / rates[name] for name in rates), 0.0)

    def times(self, count: int) -> Self:
        """A machine of `count` times as many such devices, with as much more RAM, cores and disks.

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


CPU = Hardware(
    name="cpu",
    kind="cpu",
    flops_per_s=1.0e11,
    memory_bytes_per_s=1.5e10,
    links=host_links(2.0e9, 1.5e9, from_disk=2.0e9, to_disk=1.5e9),
    fp32_flops_per_s=1.0e11,
    both_links_bytes_per_s=2.5e9,
    device_memory_nbytes=32 * GIB,
    host_memory_nbytes=32 * GIB,
    cpu_update_bytes_per_s=1.5e10,
    source="cautious round figures: a few cores, 32 GiB, a disk behind the page cache",
)
"""A few cores with a disk behind the page cache: cautious round figures."""
