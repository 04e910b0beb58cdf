"""Peaks of devices, as their datasheets state them, and the fractions of these peaks that programs reach.

The two are kept apart, so that each can be checked alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from chunkc.ir.hardware import GIB, Hardware
from chunkc.ir.links import BETWEEN_DEVICES, BETWEEN_HOSTS, LinkSpec, host_links

MIB = 1 << 20

NVLINK_LATENCY_S, NETWORK_LATENCY_S = 3.4e-6, 9.6e-6
"""Seconds of one step of a ring, as NCCL assumes to choose algorithms (`src/graph/tuning.cc`, protocol Simple)."""

KNOWN_HOSTS: Mapping[str, int] = MappingProxyType(
    {"8xv100-32g": 240 * GIB, "8xa100-40g": 1024 * GIB, "8xa100-80g": 1024 * GIB}
)
"""Hosts that papers have trained on -> bytes of their RAM. The first two: PatrickStar (arXiv:2108.05818).

Any other count of devices has that many times `Datasheet.host_nbytes`.
"""

KNOWN_CLUSTERS: Mapping[str, str] = MappingProxyType({"32xa100": "4x8xa100-40g"})
"""Names of machines that do not state their hosts -> the machine as hosts and devices."""


@dataclass(frozen=True)
class Efficiency:
    """Fractions of a datasheet's peaks that programs reach: assumptions, all in one place, from 0 to 1.

    Attributes:
        matrix: of matrix products; cuBLAS reaches 0.65 to 0.9 with a transformer's large ones, least on Hopper.
        memory: of a memory's bandwidth; streaming kernels reach 0.8 to 0.93 of the device's. The same fraction of RAM's
            bandwidth limits copies to the device.
        link: of one direction with pinned memory; PCIe's packets alone cost a tenth, and programs reach 12.5 to 13 of
            15.75 GB/s. NCCL reaches as much of links between devices and hosts: at most 235 of an A100's 300 GB/s.
        both_links: of the sum of both directions' rates, while both run.
        cpu_update: of RAM's bandwidth, in a fused update on all cores.
        disk: of a drive's sequential rates, through a file system.
    """

    matrix: float = 0.7
    memory: float = 0.85
    link: float = 0.8
    both_links: float = 0.85
    cpu_update: float = 0.7
    disk: float = 0.85


@dataclass(frozen=True)
class Datasheet:
    """Peaks of one device and of its part of a typical host.

    Units: TFLOPS without sparsity, GB/s (1e9 bytes per second), bytes.

    Attributes:
        memory_nbytes: the smallest that PyTorch reports in out-of-memory errors; the driver and error correction keep
            the rest of the advertised memory. Where no such error was found, a comment says how this was estimated.
        context_nbytes: the driver's context with cuBLAS, without cuDNN; typical, varies with driver and CUDA.
        memory_bandwidth: of the device's memory.
        fp32, tf32, bf16, fp16: rates of matrix products; None: the device has no hardware for them.
        link: one direction of the link to the host.
        host_nbytes, host_bandwidth: RAM of the host, divided by its devices. If device and host share one memory,
            `memory_nbytes` and `host_nbytes` are disjoint parts of it.
        disk: (read, write) rates of the host's drives, divided by its devices.
        capability: compute capability, major and minor; None: not an NVIDIA device. Rules that depend on it are those
            of NVIDIA's libraries.
        source: of the figures.
        reached: measured rates of the link (to the device, to home), used in place of a fraction of its peak; None:
            unknown.
        between_devices: one direction of all of the device's links to others of its host; None: it has none, like PCIe
            cards.
        between_hosts: one direction of the host's network, divided by its devices; None: unknown.
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
    capability: tuple[int, int] | None
    source: str
    reached: tuple[float, float] | None = None
    between_devices: float | None = None
    between_hosts: float | None = None

    def hardware(self, name: str, efficiency: Efficiency) -> Hardware:
        """Scale the peaks to achievable rates of one device in its host."""
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

# One direction of all NVLinks of a device: NVIDIA's datasheets of V100 (300 GB/s for both), A100 (600), H100 (900),
# B200 (1800).
_NVLINK2, _NVLINK3, _NVLINK4, _NVLINK5 = 150.0, 300.0, 450.0, 900.0
# One direction of a MI300X's seven Infinity Fabric links to its neighbours, 128 GB/s for both directions of one.
_INFINITY_FABRIC = 448.0
# One device's part of its host's InfiniBand: eight ports of 100 Gbit/s for the 16 devices of a DGX-2, of 200 for the
# eight of a DGX A100, of 400 for the eight of a DGX H100.
_EDR_HALF, _HDR, _NDR = 6.25, 25.0, 50.0

# (read, write) of one drive: Samsung's datasheets of the 970 EVO Plus, 980 PRO and PM9A3 (U.2, 3.84 TB).
_NVME3, _NVME4, _PM9A3 = (3.5, 3.3), (7.0, 5.0), (6.8, 4.0)
_HALF_PM9A3 = (_PM9A3[0] / 2, _PM9A3[1] / 2)

_AS_NVIDIA = "bytes of kernels and libraries are counted as NVIDIA's"

# Host: two channels of DDR5-5600, 64 GiB. Memory: 15.60 GiB on an RTX 4080 SUPER, which has the same chip.
_RTX4070TI_S = Datasheet(
    memory_nbytes=int(15.6 * GIB), context_nbytes=400 * MIB, memory_bandwidth=672,
    fp32=44.1, tf32=44.1, bf16=88.2, fp16=88.2, link=_PCIE4,
    host_nbytes=64 * GIB, host_bandwidth=89.6, disk=_NVME4, capability=(8, 9),
    source="NVIDIA Ada architecture white paper and GeForce RTX 4070 Ti SUPER specifications",
)  # fmt: skip

# Host: two channels of DDR5-5600, 128 GiB.
_RTX5090 = Datasheet(
    memory_nbytes=int(31.36 * GIB), context_nbytes=500 * MIB, memory_bandwidth=1792,
    fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5, link=_PCIE5,
    host_nbytes=128 * GIB, host_bandwidth=89.6, disk=_NVME4, capability=(12, 0),
    source="NVIDIA RTX Blackwell architecture white paper",
)  # fmt: skip

# Host: a workstation with one card, a Threadripper PRO 7000 with eight channels of DDR5-5200, 256 GiB.
_RTX6000_ADA = Datasheet(
    memory_nbytes=int(44.43 * GIB), context_nbytes=450 * MIB, memory_bandwidth=960,
    fp32=91.1, tf32=182.1, bf16=364.2, fp16=364.2, link=_PCIE4,
    host_nbytes=256 * GIB, host_bandwidth=332.8, disk=_NVME4, capability=(8, 9),
    source="NVIDIA Ada architecture white paper (professional cards) and RTX 6000 Ada datasheet, with error correction",
)  # fmt: skip

# Host: an eighth of AWS's g5.48xlarge: 768 GiB, two EPYC with eight channels of DDR4-3200, half a drive (estimated).
# Memory: not found; the driver's 22.49 GiB (23028 MiB) less half a GiB, PyTorch's difference on an RTX 6000 Ada.
_A10G = Datasheet(
    memory_nbytes=int(21.9 * GIB), context_nbytes=400 * MIB, memory_bandwidth=600,
    fp32=31.5, tf32=35, bf16=70, fp16=70, link=_PCIE4,
    host_nbytes=96 * GIB, host_bandwidth=409.6 / 8, disk=_HALF_PM9A3, capability=(8, 6),
    source="NVIDIA A10G datasheet (AWS; without sparsity) and AWS's specifications of g5.48xlarge",
)  # fmt: skip

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
        # 16-bit products of GeForce cards are those with fp32 sums: half the rate of those with 16-bit sums.
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
        # Eight lanes. Host: two channels of DDR5-5600, 32 GiB.
        "rtx4060-8g": replace(
            _RTX4070TI_S, memory_nbytes=int(7.75 * GIB), context_nbytes=350 * MIB, memory_bandwidth=272,
            fp32=15.1, tf32=15.1, bf16=30.2, fp16=30.2, link=_PCIE4 / 2, host_nbytes=32 * GIB,
            source="NVIDIA Ada architecture white paper and GeForce RTX 4060 specifications",
        ),
        # Eight lanes. Host and memory: those of an RTX 4070 Ti SUPER, estimated.
        "rtx4060ti-16g": replace(
            _RTX4070TI_S, memory_bandwidth=288, fp32=22.1, tf32=22.1, bf16=44.1, fp16=44.1, link=_PCIE4 / 2,
            source="NVIDIA Ada architecture white paper and GeForce RTX 4060 Ti (16 GB) specifications",
        ),
        "rtx4070ti-s-16g": _RTX4070TI_S,
        # Host: two channels of DDR5-5600, 64 GiB. Memory: not found; that of an RTX 5060 Ti of 16 GB, 15,816 MiB.
        "rtx5070ti-16g": replace(
            _RTX5090, memory_nbytes=int(15.44 * GIB), memory_bandwidth=896,
            fp32=43.9, tf32=43.9, bf16=87.9, fp16=87.9, host_nbytes=64 * GIB,
            source="NVIDIA RTX Blackwell architecture white paper and GeForce RTX 5070 Ti specifications",
        ),
        # Host and memory: those of an RTX 5070 Ti.
        "rtx5080": replace(
            _RTX5090, memory_nbytes=int(15.44 * GIB), memory_bandwidth=960,
            fp32=56.3, tf32=56.3, bf16=112.6, fp16=112.6, host_nbytes=64 * GIB,
            source="NVIDIA RTX Blackwell architecture white paper",
        ),
        "rtx5090": _RTX5090,
        # 16-bit products of professional cards are those with fp32 sums, too: at the full rate.
        # Host: a workstation with one card, a Threadripper PRO 5000 with eight channels of DDR4-3200, 256 GiB.
        # Memory: "47.5" in an error report; 47.46 GiB of a Quadro RTX 8000's 48 GB.
        "a6000": replace(
            _RTX6000_ADA, memory_nbytes=int(47.46 * GIB), context_nbytes=400 * MIB, memory_bandwidth=768,
            fp32=38.7, tf32=77.4, bf16=154.8, fp16=154.8, host_bandwidth=204.8, capability=(8, 6),
            source="NVIDIA Ampere GA102 architecture white paper and RTX A6000 datasheet, without an NVLink bridge",
        ),
        "rtx6000-ada": _RTX6000_ADA,
        # Host: a workstation with one card, a Threadripper PRO 9000 with eight channels of DDR5-6400, 256 GiB.
        "rtx-pro-6000": replace(
            _RTX6000_ADA, memory_nbytes=int(94.97 * GIB), context_nbytes=500 * MIB, memory_bandwidth=1792,
            fp32=125.9, tf32=251.9, bf16=503.8, fp16=503.8, link=_PCIE5, host_bandwidth=409.6, capability=(12, 0),
            source="NVIDIA RTX Blackwell PRO architecture white paper and RTX PRO 6000 Blackwell Workstation Edition "
            "datasheet",
        ),
        # Host: that of an RTX 6000 Ada. Memory: not found; error correction keeps a sixteenth of 48 GB. 16-bit products
        # with fp32 sums: the datasheet's rate for half precision.
        "w7900": replace(
            _RTX6000_ADA, memory_nbytes=int(44.9 * GIB), memory_bandwidth=864,
            fp32=61.3, tf32=None, bf16=122.6, fp16=122.6, capability=None,
            source=f"AMD Radeon PRO W7900 datasheet; {_AS_NVIDIA}",
        ),
        # Host: an eighth of AWS's g6.48xlarge, equal to a g5.48xlarge. Memory: that of an A10G, estimated.
        "l4": replace(
            _A10G, memory_bandwidth=300, fp32=30.3, tf32=60, bf16=121, fp16=121, capability=(8, 9),
            source="NVIDIA L4 datasheet (halved: it counts sparsity) and AWS's specifications of g6.48xlarge",
        ),
        "a10g": _A10G,
        # Host: an eighth of AWS's g6e.48xlarge: 1536 GiB, processors as in g5.48xlarge, half a drive.
        "l40s": replace(
            _A10G, memory_nbytes=int(44.39 * GIB), context_nbytes=450 * MIB, memory_bandwidth=864,
            fp32=91.6, tf32=183, bf16=362, fp16=362, host_nbytes=192 * GIB, capability=(8, 9),
            source="NVIDIA L40S datasheet (without sparsity) and AWS's specifications of g6e.48xlarge",
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
            host_nbytes=128 * GIB, host_bandwidth=409.6 / 8, disk=_HALF_PM9A3, capability=(8, 0),
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
        "h100-sxm": _H100,
        # Host: that of a DGX H100, without its NVSwitches and network. Memory: not found; that of an SXM module, since
        # the driver states the same for both.
        "h100-pcie": replace(
            _H100, memory_bandwidth=2000, fp32=51, tf32=378, bf16=756, fp16=756,
            between_devices=None, between_hosts=None,
            source="NVIDIA H100 datasheet (PCIe, 80 GB; halved: the datasheet counts sparsity), without an NVLink "
            "bridge, and DGX H100 datasheet for the host",
        ),
        # Host: an eighth of a DGX H200, equal to that of a DGX H100.
        "h200": replace(
            _H100, memory_nbytes=int(139.7 * GIB), memory_bandwidth=4800,
            source="NVIDIA H200 datasheet (SXM, 141 GB; halved: the datasheet counts sparsity) and DGX H200 datasheet",
        ),
        # Host: an eighth of a DGX B200: 2 TB, two Xeon 8570 with eight channels of DDR5-5600, eight drives.
        "b200": Datasheet(
            memory_nbytes=int(178.3 * GIB), context_nbytes=700 * MIB, memory_bandwidth=8000,
            fp32=75, tf32=1100, bf16=2250, fp16=2250, link=_PCIE5,
            host_nbytes=256 * GIB, host_bandwidth=716.8 / 8, disk=_PM9A3, capability=(10, 0),
            between_devices=_NVLINK5, between_hosts=_NDR,
            source="NVIDIA HGX B200 datasheet (without sparsity), DGX B200 datasheet (180 GB, 8 TB/s) and user guide",
        ),
        # Host: an eighth of a server with 2 TB, two EPYC 9004 with twelve channels of DDR5-4800, eight drives.
        # Memory: not found; 192 GiB less a tenth of a GiB. PyTorch reports 0.02 GiB less than a MI355X's 288 GiB.
        "mi300x": Datasheet(
            memory_nbytes=int(191.9 * GIB), context_nbytes=600 * MIB, memory_bandwidth=5300,
            fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4, link=_PCIE5,
            host_nbytes=256 * GIB, host_bandwidth=921.6 / 8, disk=_PM9A3, capability=None,
            between_devices=_INFINITY_FABRIC, between_hosts=_NDR,
            source=f"AMD Instinct MI300X data sheet and MI300X platform data sheet (without sparsity); {_AS_NVIDIA}",
        ),
        # One memory of 128 GB. CUDA sees 121.69 GiB, of which 101 to 102 are free after the start: 100 GiB count as the
        # device's, 16 as the host's. A copy reads and writes that memory, and so does a simultaneous copy the other
        # way: each has a quarter of its bandwidth. tf32, bf16 and fp16 are estimated from the stated 1,000 TFLOPS of
        # sparse fp4, by an RTX PRO 6000's ratios to its own. Between hosts: 200 Gbit/s of Ethernet.
        "dgx-spark": Datasheet(
            memory_nbytes=100 * GIB, context_nbytes=500 * MIB, memory_bandwidth=273,
            fp32=31, tf32=62.5, bf16=125, fp16=125, link=273 / 4,
            host_nbytes=16 * GIB, host_bandwidth=273, disk=_NVME4, capability=(12, 1),
            between_hosts=_HDR,
            source="NVIDIA DGX Spark datasheet; fp32 from NVIDIA's GB10 slides at Hot Chips 2025, bf16 estimated from "
            "sparse fp4. Device and host have one memory of 128 GB, of which 100 GiB count as the device's and 16 GiB "
            "as the host's: a home in RAM adds no memory, only a home on disk does",
        ),
        # Host: its own Grace with 480 GB of LPDDR5X; one drive. Its link is faster to the device than home: the
        # SuperOffload paper (2025) measures 415 and 170 GB/s. RAM of 480 GB is slower than smaller ones, and limits
        # copies to the device.
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
"""Name of a preset -> peaks of its device."""
