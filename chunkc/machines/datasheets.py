"""Devices at their peaks, as their datasheets state them, and the parts of these peaks that programs reach.

The two are kept apart, so that either can be doubted alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from chunkc.ir.hardware import GIB, Hardware
from chunkc.ir.links import BETWEEN_DEVICES, BETWEEN_HOSTS, LinkSpec, host_links

MIB = 1 << 20

NVLINK_LATENCY_S, NETWORK_LATENCY_S = 3.4e-6, 9.6e-6
"""Of one step of a ring, as NCCL reckons with it to choose its algorithms (`src/graph/tuning.cc`, protocol Simple)."""

KNOWN_HOSTS: Mapping[str, int] = MappingProxyType(
    {"8xv100-32g": 240 * GIB, "8xa100-40g": 1024 * GIB, "8xa100-80g": 1024 * GIB}
)
"""Hosts that papers have trained on (PatrickStar, arXiv:2108.05818, the first two), and their RAM. The RAM of any other
count of devices is that of so many parts of the host in the device's datasheet."""

KNOWN_CLUSTERS: Mapping[str, str] = MappingProxyType({"32xa100": "4x8xa100-40g"})
"""Machines by a name that does not say their hosts."""


@dataclass(frozen=True)
class Efficiency:
    """Parts of a datasheet's peaks that programs reach: assumptions, all in one place, 0 to 1.

    Attributes:
        matrix: of matrix products; cuBLAS reaches 0.65 to 0.9 with a transformer's large ones, least on Hopper.
        memory: of a memory's bandwidth; streaming kernels reach 0.8 to 0.93 of the device's. No copy to the device is
            faster than that of RAM.
        link: of one direction with pinned memory; PCIe's packets alone cost a tenth, 12.5 to 13 of 15.75 GB/s. Of links
            between devices and between hosts NCCL reaches as much: at most 235 of an A100's 300 GB/s.
        both_links: of twice one direction's rate, while both run.
        cpu_update: of RAM's bandwidth, in a fused update on all cores.
        disk: of a drive's sequential rates, with a file system in between.
    """

    matrix: float = 0.7
    memory: float = 0.85
    link: float = 0.8
    both_links: float = 0.85
    cpu_update: float = 0.7
    disk: float = 0.85


@dataclass(frozen=True)
class Datasheet:
    """Peak figures of one device and of the part of a typical machine that comes with it.

    Units: teraflops per second without sparsity, gigabytes (1e9) per second, bytes. None: no unit for it.

    Attributes:
        memory_nbytes: as PyTorch reports it in its out-of-memory errors, the smallest seen: the driver and error
            correction keep some of the memory on the box.
        context_nbytes: the driver's context with cuBLAS, without cuDNN; typical, varies with driver and CUDA.
        link: one direction of the link to the host.
        reached: rates of the link (to the device, to home) that programs were measured to reach, in the place of a part
            of its peak; None: not known.
        host_nbytes, host_bandwidth: RAM of the machine, over its devices.
        disk: (read, write) of the machine's drives, over its devices.
        capability: compute capability, major and minor.
        source: of the figures.
        between_devices: one direction of all of the device's links to others of its host; None: it has none, as PCIe
            cards do.
        between_hosts: what one direction of the host's network is for each of its devices; None: not known.
    """

    memory_nbytes: int
    context_nbytes: int
    memory_bandwidth: float
    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float
    link: float
    host_nbytes: int
    host_bandwidth: float
    disk: tuple[float, float]
    capability: tuple[int, int]
    source: str
    reached: tuple[float, float] | None = None
    between_devices: float | None = None
    between_hosts: float | None = None

    def hardware(self, name: str, efficiency: Efficiency) -> Hardware:
        """Scale the peaks to achievable rates: one device in its machine."""
        e = efficiency

        def flops(teraflops: float | None) -> float | None:
            return None if teraflops is None else teraflops * 1e12 * e.matrix

        half = self.fp16 if self.bf16 is None else self.bf16
        link = self.link * 1e9 * e.link
        to_device, to_home = (link, link) if self.reached is None else (rate * 1e9 for rate in self.reached)
        to_device = min(to_device, self.host_bandwidth * 1e9 * e.memory)
        between = tuple(
            LinkSpec(name, rate * 1e9 * e.link, latency_s)
            for name, rate, latency_s in (
                (BETWEEN_DEVICES, self.between_devices, NVLINK_LATENCY_S),
                (BETWEEN_HOSTS, self.between_hosts, NETWORK_LATENCY_S),
            )
            if rate is not None
        )
        return Hardware(
            name=name,
            kind="cuda",
            flops_per_s=half * 1e12 * e.matrix,
            memory_bytes_per_s=self.memory_bandwidth * 1e9 * e.memory,
            links=(*host_links(to_device, to_home, *(rate * 1e9 * e.disk for rate in self.disk)), *between),
            both_links_bytes_per_s=(to_device + to_home) * e.both_links,
            device_memory_nbytes=self.memory_nbytes,
            context_nbytes=self.context_nbytes,
            fp32_flops_per_s=flops(self.fp32),
            tf32_flops_per_s=flops(self.tf32),
            bf16_flops_per_s=flops(self.bf16),
            fp16_flops_per_s=flops(self.fp16),
            host_memory_nbytes=self.host_nbytes,
            cpu_update_bytes_per_s=self.host_bandwidth * 1e9 * e.cpu_update,
            capability=self.capability,
            source=self.source,
        )


# One direction of 16 lanes, after 128b/130b coding: PCI Express base specifications 3.0, 4.0, 5.0.
_PCIE3, _PCIE4, _PCIE5 = 15.75, 31.5, 63.0
# One direction of NVLink-C2C: NVIDIA GH200 datasheet, 900 GB/s for both.
_C2C = 450.0

# One direction of all NVLinks of a device: NVIDIA's datasheets of V100 (300 GB/s for both), A100 (600), H100 (900).
_NVLINK2, _NVLINK3, _NVLINK4 = 150.0, 300.0, 450.0
# InfiniBand of a device, which is a part of its host's: eight ports of 100 Gbit/s over a DGX-2's 16 devices, of 200
# over a DGX A100's eight, of 400 over a DGX H100's eight.
_EDR_HALF, _HDR, _NDR = 6.25, 25.0, 50.0

# (read, write) of one drive: Samsung's datasheets of the 970 EVO Plus, 980 PRO and PM9A3 (U.2, 3.84 TB).
_NVME3, _NVME4, _PM9A3 = (3.5, 3.3), (7.0, 5.0), (6.8, 4.0)

# Host: an eighth of a DGX H100: 2 TB, two Xeon 8480C with eight channels of DDR5-4800, eight drives.
_H100 = Datasheet(
    memory_nbytes=int(79.1 * GIB), context_nbytes=600 * MIB, memory_bandwidth=3350,
    fp32=67, tf32=494.7, bf16=989.4, fp16=989.4, link=_PCIE5,
    host_nbytes=256 * GIB, host_bandwidth=614.4 / 8, disk=_PM9A3, capability=(9, 0),
    between_devices=_NVLINK4, between_hosts=_NDR,
    source="NVIDIA H100 datasheet (SXM5, 80 GB; halved: the datasheet counts sparsity) and DGX H100 datasheet",
)  # fmt: skip

DATASHEETS: Mapping[str, Datasheet] = MappingProxyType(
    {
        # 16-bit products of GeForce cards with fp32 sums: half the rate with 16-bit sums.
        # Host: two channels of DDR4-2666, 32 GiB.
        "rtx2060-6g": Datasheet(
            memory_nbytes=int(5.6 * GIB), context_nbytes=300 * MIB, memory_bandwidth=336,
            fp32=6.45, tf32=None, bf16=None, fp16=25.8, link=_PCIE3,
            host_nbytes=32 * GIB, host_bandwidth=42.7, disk=_NVME3, capability=(7, 5),
            source="NVIDIA Turing architecture white paper and GeForce RTX 2060 specifications",
        ),
        # Host: two channels of DDR4-3200, 64 GiB.
        "rtx3090": Datasheet(
            memory_nbytes=int(23.5 * GIB), context_nbytes=400 * MIB, memory_bandwidth=936,
            fp32=35.6, tf32=35.6, bf16=71.2, fp16=71.2, link=_PCIE4,
            host_nbytes=64 * GIB, host_bandwidth=51.2, disk=_NVME4, capability=(8, 6),
            source="NVIDIA Ampere GA102 architecture white paper, table 3",
        ),
        # Host: two channels of DDR5-5600, 128 GiB.
        "rtx4090": Datasheet(
            memory_nbytes=int(23.5 * GIB), context_nbytes=450 * MIB, memory_bandwidth=1008,
            fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, link=_PCIE4,
            host_nbytes=128 * GIB, host_bandwidth=89.6, disk=_NVME4, capability=(8, 9),
            source="NVIDIA Ada architecture white paper, appendix A",
        ),
        # Host: a sixteenth of a DGX-2: 1.5 TB, two Xeon 8168 with six channels of DDR4-2666, eight drives.
        "v100-32g": Datasheet(
            memory_nbytes=int(31.7 * GIB), context_nbytes=350 * MIB, memory_bandwidth=900,
            fp32=15.7, tf32=None, bf16=None, fp16=125, link=_PCIE3,
            host_nbytes=96 * GIB, host_bandwidth=256 / 16, disk=(_NVME3[0] / 2, _NVME3[1] / 2), capability=(7, 0),
            between_devices=_NVLINK2, between_hosts=_EDR_HALF,
            source="NVIDIA V100 datasheet (SXM2, 32 GB) and DGX-2 datasheet",
        ),
        # Host: an eighth of a DGX A100 320GB: 1 TB, two EPYC 7742 with eight channels of DDR4-3200, four drives.
        "a100-40g": Datasheet(
            memory_nbytes=int(39.2 * GIB), context_nbytes=450 * MIB, memory_bandwidth=1555,
            fp32=19.5, tf32=156, bf16=312, fp16=312, link=_PCIE4,
            host_nbytes=128 * GIB, host_bandwidth=409.6 / 8, disk=(_PM9A3[0] / 2, _PM9A3[1] / 2), capability=(8, 0),
            between_devices=_NVLINK3, between_hosts=_HDR,
            source="NVIDIA A100 datasheet (SXM4, 40 GB) and DGX A100 datasheet",
        ),
        # Host: an eighth of a DGX A100 640GB: 2 TB, the same processors, eight drives.
        "a100-80g": Datasheet(
            memory_nbytes=int(79.1 * GIB), context_nbytes=450 * MIB, memory_bandwidth=2039,
            fp32=19.5, tf32=156, bf16=312, fp16=312, link=_PCIE4,
            host_nbytes=256 * GIB, host_bandwidth=409.6 / 8, disk=_PM9A3, capability=(8, 0),
            between_devices=_NVLINK3, between_hosts=_HDR,
            source="NVIDIA A100 datasheet (SXM4, 80 GB) and DGX A100 datasheet",
        ),
        "h100": _H100,
        # Host: an eighth of a DGX H200, which has the DGX H100's.
        "h200": replace(
            _H100, memory_nbytes=int(139.7 * GIB), memory_bandwidth=4800,
            source="NVIDIA H200 datasheet (SXM, 141 GB; halved: the datasheet counts sparsity) and DGX H200 datasheet",
        ),
        # Host: its own Grace with 480 GB of LPDDR5X; one drive. Its link reaches more to the device than home: the
        # paper on SuperOffload (2025) has 415 and 170 GB/s. A module with 480 GB has slower RAM, which is the limit.
        "gh200": Datasheet(
            memory_nbytes=int(94.5 * GIB), context_nbytes=600 * MIB, memory_bandwidth=4000,
            fp32=67, tf32=494.7, bf16=989.4, fp16=989.4, link=_C2C,
            host_nbytes=480 * 10**9, host_bandwidth=384, disk=_PM9A3, capability=(9, 0),
            reached=(415, 170), between_hosts=_NDR,
            source="NVIDIA GH200 datasheet (96 GB HBM3, 480 GB LPDDR5X; halved: the datasheet counts sparsity); "
            "its link as the SuperOffload paper measured it, where its RAM is fast enough",
        ),
    }
)  # fmt: skip
"""The devices that presets are made of, at their peaks."""
