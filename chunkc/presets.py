"""Machines by name, and by file: what `--hardware` accepts.

A preset is a datasheet's peaks (`Datasheet`) times what programs reach of them (`Efficiency`); the two are kept
apart, so that either can be doubted alone. A file states achievable figures itself, whole or as changes to a
preset:

    based_on: rtx3090
    name: my workstation
    host_memory_nbytes: 288GiB
    to_device_bytes_per_s: 24GB/s
"""

from __future__ import annotations

import difflib
import json
import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from chunkc.ir.errors import OptionsError
from chunkc.ir.hardware import CPU, GIB, Hardware

MIB = 1 << 20


@dataclass(frozen=True)
class Efficiency:
    """Parts of a datasheet's peaks that programs reach: assumptions, all in one place, 0 to 1.

    Attributes:
        matrix: of matrix products; cuBLAS reaches 0.65 to 0.9 with a transformer's large ones, least on Hopper.
        memory: of the device memory's bandwidth; streaming kernels reach 0.8 to 0.93.
        link: of one direction with pinned memory; PCIe's packets alone cost a tenth, 12.5 to 13 of 15.75 GB/s.
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
        host_nbytes, host_bandwidth: RAM of the machine, over its devices.
        disk: (read, write) of the machine's drives, over its devices.
        source: of the figures.
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
    source: str

    def hardware(self, name: str, efficiency: Efficiency) -> Hardware:
        """One such device in its machine, at achievable rates."""
        e = efficiency

        def flops(teraflops: float | None) -> float | None:
            return None if teraflops is None else teraflops * 1e12 * e.matrix

        half = self.fp16 if self.bf16 is None else self.bf16
        link = self.link * 1e9 * e.link
        return Hardware(
            name=name,
            kind="cuda",
            flops_per_s=half * 1e12 * e.matrix,
            memory_bytes_per_s=self.memory_bandwidth * 1e9 * e.memory,
            to_device_bytes_per_s=link,
            to_home_bytes_per_s=link,
            both_links_bytes_per_s=2 * link * e.both_links,
            device_memory_nbytes=self.memory_nbytes,
            context_nbytes=self.context_nbytes,
            fp32_flops_per_s=flops(self.fp32),
            tf32_flops_per_s=flops(self.tf32),
            bf16_flops_per_s=flops(self.bf16),
            fp16_flops_per_s=flops(self.fp16),
            host_memory_nbytes=self.host_nbytes,
            cpu_update_bytes_per_s=self.host_bandwidth * 1e9 * e.cpu_update,
            disk_read_bytes_per_s=self.disk[0] * 1e9 * e.disk,
            disk_write_bytes_per_s=self.disk[1] * 1e9 * e.disk,
            source=self.source,
        )


# One direction of 16 lanes, after 128b/130b coding: PCI Express base specifications 3.0, 4.0, 5.0.
_PCIE3, _PCIE4, _PCIE5 = 15.75, 31.5, 63.0
# One direction of NVLink-C2C: NVIDIA GH200 datasheet, 900 GB/s for both.
_C2C = 450.0

# (read, write) of one drive: Samsung's datasheets of the 970 EVO Plus, 980 PRO and PM9A3 (U.2, 3.84 TB).
_NVME3, _NVME4, _PM9A3 = (3.5, 3.3), (7.0, 5.0), (6.8, 4.0)

DATASHEETS: Mapping[str, Datasheet] = MappingProxyType(
    {
        # 16-bit products of GeForce cards with fp32 sums: half the rate with 16-bit sums.
        # Host: two channels of DDR4-2666, 32 GiB.
        "rtx2060-6g": Datasheet(
            memory_nbytes=int(5.6 * GIB), context_nbytes=300 * MIB, memory_bandwidth=336,
            fp32=6.45, tf32=None, bf16=None, fp16=25.8, link=_PCIE3,
            host_nbytes=32 * GIB, host_bandwidth=42.7, disk=_NVME3,
            source="NVIDIA Turing architecture white paper and GeForce RTX 2060 specifications",
        ),
        # Host: two channels of DDR4-3200, 64 GiB.
        "rtx3090": Datasheet(
            memory_nbytes=int(23.5 * GIB), context_nbytes=400 * MIB, memory_bandwidth=936,
            fp32=35.6, tf32=35.6, bf16=71.2, fp16=71.2, link=_PCIE4,
            host_nbytes=64 * GIB, host_bandwidth=51.2, disk=_NVME4,
            source="NVIDIA Ampere GA102 architecture white paper, table 3",
        ),
        # Host: two channels of DDR5-5600, 128 GiB.
        "rtx4090": Datasheet(
            memory_nbytes=int(23.5 * GIB), context_nbytes=450 * MIB, memory_bandwidth=1008,
            fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, link=_PCIE4,
            host_nbytes=128 * GIB, host_bandwidth=89.6, disk=_NVME4,
            source="NVIDIA Ada architecture white paper, appendix A",
        ),
        # Host: a sixteenth of a DGX-2: 1.5 TB, two Xeon 8168 with six channels of DDR4-2666, eight drives.
        "v100-32g": Datasheet(
            memory_nbytes=int(31.7 * GIB), context_nbytes=350 * MIB, memory_bandwidth=900,
            fp32=15.7, tf32=None, bf16=None, fp16=125, link=_PCIE3,
            host_nbytes=96 * GIB, host_bandwidth=256 / 16, disk=(_NVME3[0] / 2, _NVME3[1] / 2),
            source="NVIDIA V100 datasheet (SXM2, 32 GB) and DGX-2 datasheet",
        ),
        # Host: an eighth of a DGX A100 320GB: 1 TB, two EPYC 7742 with eight channels of DDR4-3200, four drives.
        "a100-40g": Datasheet(
            memory_nbytes=int(39.2 * GIB), context_nbytes=450 * MIB, memory_bandwidth=1555,
            fp32=19.5, tf32=156, bf16=312, fp16=312, link=_PCIE4,
            host_nbytes=128 * GIB, host_bandwidth=409.6 / 8, disk=(_PM9A3[0] / 2, _PM9A3[1] / 2),
            source="NVIDIA A100 datasheet (SXM4, 40 GB) and DGX A100 datasheet",
        ),
        # Host: an eighth of a DGX A100 640GB: 2 TB, the same processors, eight drives.
        "a100-80g": Datasheet(
            memory_nbytes=int(79.1 * GIB), context_nbytes=450 * MIB, memory_bandwidth=2039,
            fp32=19.5, tf32=156, bf16=312, fp16=312, link=_PCIE4,
            host_nbytes=256 * GIB, host_bandwidth=409.6 / 8, disk=_PM9A3,
            source="NVIDIA A100 datasheet (SXM4, 80 GB) and DGX A100 datasheet",
        ),
        # Host: an eighth of a DGX H100: 2 TB, two Xeon 8480C with eight channels of DDR5-4800, eight drives.
        "h100": Datasheet(
            memory_nbytes=int(79.1 * GIB), context_nbytes=600 * MIB, memory_bandwidth=3350,
            fp32=67, tf32=494.7, bf16=989.4, fp16=989.4, link=_PCIE5,
            host_nbytes=256 * GIB, host_bandwidth=614.4 / 8, disk=_PM9A3,
            source="NVIDIA H100 datasheet (SXM5, 80 GB; halved: the datasheet counts sparsity) and DGX H100 datasheet",
        ),
        # Host: an eighth of a DGX H200, which has the DGX H100's.
        "h200": Datasheet(
            memory_nbytes=int(139.7 * GIB), context_nbytes=600 * MIB, memory_bandwidth=4800,
            fp32=67, tf32=494.7, bf16=989.4, fp16=989.4, link=_PCIE5,
            host_nbytes=256 * GIB, host_bandwidth=614.4 / 8, disk=_PM9A3,
            source="NVIDIA H200 datasheet (SXM, 141 GB; halved: the datasheet counts sparsity) and DGX H200 datasheet",
        ),
        # Host: its own Grace with 480 GB of LPDDR5X; one drive.
        "gh200": Datasheet(
            memory_nbytes=int(94.5 * GIB), context_nbytes=600 * MIB, memory_bandwidth=4000,
            fp32=67, tf32=494.7, bf16=989.4, fp16=989.4, link=_C2C,
            host_nbytes=480 * 10**9, host_bandwidth=384, disk=_PM9A3,
            source="NVIDIA GH200 datasheet (96 GB HBM3, 480 GB LPDDR5X; halved: the datasheet counts sparsity)",
        ),
    }
)  # fmt: skip
"""The devices that presets are made of, at their peaks."""

PRESETS = ("cpu", *DATASHEETS)
"""Names of all presets."""

_COUNTED = re.compile(r"([0-9]{1,6})\s*x\s*(.+)", re.IGNORECASE)
_FILE_ENDINGS = (".json", ".yaml", ".yml")
_ALLOWED_TEXT = (
    f"a preset ({', '.join(PRESETS)}), a count of one such as 8xv100-32g, or a file that ends in .json, .yaml or .yml"
)


def preset(name: str, efficiency: Efficiency | None = None) -> Hardware:
    """The preset of that name; `cpu` states achievable figures already and has no datasheet.

    Raises:
        OptionsError: there is none.
    """
    wanted = name.strip().lower()
    if wanted == "cpu":
        return CPU
    if wanted in DATASHEETS:
        return DATASHEETS[wanted].hardware(wanted, efficiency or Efficiency())
    nearest = [known for known in PRESETS if wanted and wanted in known]
    nearest = nearest or difflib.get_close_matches(wanted, PRESETS, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(known) for known in nearest)}? " if nearest else ""
    raise OptionsError(f"no hardware is called {name!r}; {hint}allowed: {_ALLOWED_TEXT}")


def load_hardware(text: str) -> Hardware:
    """The machine that a user names: a preset, a count of one (`8xv100-32g`), or a file.

    A count multiplies devices, and with them RAM, CPU and disks: the machine is that much larger.

    Raises:
        OptionsError: one line that says what is wrong and what is allowed.
    """
    text = text.strip()
    if text.lower().endswith(_FILE_ENDINGS):
        return read_hardware(Path(text).expanduser())
    counted = _COUNTED.fullmatch(text)
    if counted is None:
        return preset(text)
    count = int(counted[1])
    if count < 1:
        raise OptionsError(f"hardware {text!r} has no device; a count is at least 1")
    return preset(counted[2]).times(count)


def read_hardware(path: Path) -> Hardware:
    """A machine from a JSON or YAML file: fields of `Hardware` by name, and `based_on` for a preset to change.

    Sizes and rates may be written with units: `288GiB`, `24GB/s`, `71TFLOPS`. JSON of `save_hardware` is such a
    file.

    Raises:
        OptionsError: the file is missing or no mapping, a key is unknown or has a wrong value, or a needed one is
            missing; PyYAML is not installed and the file is YAML.
    """
    content = _parse(path)
    if not isinstance(content, dict):
        raise OptionsError(f"{path}: a hardware file maps names to figures; this one holds {reprlib.repr(content)}")
    unknown = [key for key in content if key not in _HardwareFile.model_fields]
    if unknown:
        raise OptionsError(f"{path}: " + "; ".join(_unknown_key(key) for key in unknown))
    try:
        stated = _HardwareFile.model_validate(content).model_dump(exclude_unset=True)
    except ValidationError as error:
        keys = dict.fromkeys(str(detail["loc"][0]) for detail in error.errors())
        wrong = [f"{key} is {reprlib.repr(content[key])}; allowed: {_allowed(key)}" for key in keys]
        raise OptionsError(f"{path}: " + "; ".join(wrong)) from None
    base = stated.pop("based_on", None)
    try:
        if base is not None:
            return replace(load_hardware(base), **stated)
        if missing := [key for key in _REQUIRED if key not in stated]:
            raise OptionsError(f"{', '.join(missing)} missing; give all of {', '.join(_REQUIRED)}, or based_on")
        return Hardware(**stated)
    except OptionsError as error:
        raise OptionsError(f"{path}: {error}") from None


def default_hardware_path() -> Path:
    """Where `chunkc calibrate` saves: `$XDG_CONFIG_HOME/chunkc/hardware.json`, by default in `~/.config`.

    A relative `XDG_CONFIG_HOME` is ignored, as the XDG base directory specification says.
    """
    configured = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    folder = configured if configured.is_absolute() else Path.home() / ".config"
    return folder / "chunkc" / "hardware.json"


def save_hardware(hardware: Hardware, path: Path) -> None:
    """Write a machine as JSON that `load_hardware` reads back equal; makes the folder if need be.

    Raises:
        OSError: the file cannot be written.
    """
    stated = {key: value for key, value in asdict(hardware).items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stated, indent=2) + "\n")


_BYTES = {f"{p}b": 1000**power for power, p in enumerate(("", "k", "m", "g", "t"))} | {
    f"{p}ib": 1024**power for power, p in enumerate(("k", "m", "g", "t"), start=1)
}
_RATES = {f"{unit}/s": factor for unit, factor in _BYTES.items()}
_FLOPS = {f"{p}flop{s}": 10**power for p, power in (("g", 9), ("t", 12), ("p", 15)) for s in ("s", "/s")}
_FIGURE = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*([a-z/]*)", re.IGNORECASE)


def _figure(value: object, units: Mapping[str, int]) -> float:
    """A number, or text of a number with one of the units; `1e9` is text to a YAML reader."""
    if isinstance(value, str):
        match = _FIGURE.fullmatch(value.strip())
        if match is None or not (match[2] == "" or match[2].lower() in units):
            raise ValueError("no such figure")
        value = float(match[1]) * units.get(match[2].lower(), 1)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("not a number")
    if not 0 < value < float("inf"):
        raise ValueError("not positive and finite")
    return float(value)


def _size(value: object) -> int:
    """Whole bytes. A context may be 0."""
    return 0 if type(value) is int and value == 0 else int(_figure(value, _BYTES))


_Text = Annotated[str, Field(strict=True, min_length=1)]
_Size = Annotated[int, BeforeValidator(_size)]
_Rate = Annotated[float, BeforeValidator(lambda value: _figure(value, _RATES))]
_Flops = Annotated[float, BeforeValidator(lambda value: _figure(value, _FLOPS))]


class _HardwareFile(BaseModel):
    """What a hardware file may say: the fields of `Hardware`, and `based_on`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    based_on: _Text = "cpu"
    name: _Text = "custom"
    kind: Literal["cpu", "cuda"] = "cpu"
    num_devices: Annotated[int, Field(strict=True, ge=1)] = 1
    source: Annotated[str, Field(strict=True)] = ""
    device_memory_nbytes: _Size = 1
    context_nbytes: _Size = 0
    host_memory_nbytes: _Size = 1
    flops_per_s: _Flops = 1
    fp32_flops_per_s: _Flops = 1
    tf32_flops_per_s: _Flops = 1
    bf16_flops_per_s: _Flops = 1
    fp16_flops_per_s: _Flops = 1
    memory_bytes_per_s: _Rate = 1
    to_device_bytes_per_s: _Rate = 1
    to_home_bytes_per_s: _Rate = 1
    both_links_bytes_per_s: _Rate = 1
    cpu_update_bytes_per_s: _Rate = 1
    disk_read_bytes_per_s: _Rate = 1
    disk_write_bytes_per_s: _Rate = 1


_REQUIRED = tuple(field.name for field in fields(Hardware) if field.default is MISSING)
_ALLOWED = {
    "based_on": "a preset or a count of one",
    "name": "a text",
    "source": "a text",
    "kind": '"cpu" or "cuda"',
    "num_devices": "a whole number of at least 1",
}


def _allowed(key: str) -> str:
    if key in _ALLOWED:
        return _ALLOWED[key]
    if key.endswith("_nbytes"):
        return 'bytes, or a size such as "24GiB" or "24GB"'
    if key.endswith("flops_per_s"):
        return 'operations per second, or a rate such as "71TFLOPS"'
    return 'bytes per second, or a rate such as "24GB/s"'


def _unknown_key(key: object) -> str:
    nearest = difflib.get_close_matches(str(key), _HardwareFile.model_fields, n=1, cutoff=0.5)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return f"unknown key {key!r}{hint}; allowed: {', '.join(_HardwareFile.model_fields)}"


def _parse(path: Path) -> Any:
    """What a JSON or YAML file holds."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise OptionsError(f"cannot read the hardware file {path}: {reason}; allowed: {_ALLOWED_TEXT}") from None
    if path.suffix.lower() == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise OptionsError(f"{path}: not JSON: {error}") from None
    try:
        import yaml
    except ImportError:
        raise OptionsError(f"{path}: reading YAML needs PyYAML: run `pip install pyyaml`, or write JSON") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise OptionsError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
