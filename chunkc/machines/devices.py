"""Look up the device that a model computes on: its name, memory, rates, and bytes that libraries keep on it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.hardware import CPU, Hardware
from chunkc.machines.datasheets import DATASHEETS
from chunkc.machines.host import compute_tier_memory
from chunkc.machines.presets import default_hardware_path, load_hardware, preset
from chunkc.passes.graphs.cuda_memory import (
    GRANULE_NBYTES,
    cublas_workspace_nbytes,
    cublaslt_workspace_nbytes,
    rounded_nbytes,
    shares_workspaces,
    workspaces_nbytes,
)

TABLES_NBYTES = 4 << 20
"""Bytes for the optimizer's tables of work and scalars (see `chunkc.optim.on_device`)."""

_CAUTIOUS = "rtx2060-6g"
# The first match counts. A DGX Spark is left out: its preset divides one memory, which the driver and the host both
# report whole. AMD's devices are left out: the capability that PyTorch reports for them is not NVIDIA's.
_NAMES = (
    (r"\bB200\b", "b200"),
    (r"\bGH200\b", "gh200"),
    (r"\bH200\b", "h200"),
    (r"\bH100 PCIe\b", "h100-pcie"),
    (r"\bH100\b", "h100"),
    (r"\bA100\b.*\b80GB\b", "a100-80g"),
    (r"\bA100\b.*\b40GB\b", "a100-40g"),
    (r"\bV100\b.*\b32GB\b", "v100-32g"),
    (r"\bA10G\b", "a10g"),
    (r"\bL40S\b", "l40s"),
    (r"\bL4\b", "l4"),
    (r"\bRTX PRO 6000\b(?!.* Max Q\b)", "rtx-pro-6000"),
    (r"\bRTX 6000 Ada\b", "rtx6000-ada"),
    (r"\bRTX A6000\b", "a6000"),
    (r"\bRTX 5090\b(?! Laptop)", "rtx5090"),
    (r"\bRTX 5080\b(?! Laptop)", "rtx5080"),
    (r"\bRTX 5070 Ti\b(?! Laptop)", "rtx5070ti-16g"),
    (r"\bRTX 4090\b", "rtx4090"),
    (r"\bRTX 4070 Ti SUPER\b", "rtx4070ti-s-16g"),
    (r"\bRTX 4060 Ti\b", "rtx4060ti-16g"),
    (r"\bRTX 4060\b(?! Ti| Laptop)", "rtx4060-8g"),
    (r"\bRTX 3090\b", "rtx3090"),
    (r"\bRTX 2060\b", "rtx2060-6g"),
)


def parse_device(device: torch.device | str) -> torch.device:
    """Parse the device that a user names; a CUDA device without an index gets the current device's.

    Raises:
        OptionsError: torch does not know the device.
        UnsupportedError: chunkc supports no device of this type, or the device is not available.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise OptionsError(f"device is {device!r}, which torch does not know") from error
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise UnsupportedError(f"device is {str(device)!r}; chunkc computes on the CPU and on CUDA devices")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (found.index or 0) >= count:
        what = f"{count} CUDA device{'s' if count > 1 else ''}" if count else "no CUDA device"
        raise UnsupportedError(f"device is {str(device)!r}, but there is {what} that this torch can use")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def memory_of(device: torch.device, hardware: Hardware) -> tuple[int, int]:
    """Return (total, available) bytes of the memory that a device computes in; torch's cached blocks are available.

    Memory that the driver has yet to take is not available: page tables for all host memory that is available now, and
    the missing part of the context, since the driver loads libraries and kernels at their first use. Memory of other
    processes on the device is mistaken for context that is already loaded.
    """
    if device.type != "cuda":
        return compute_tier_memory()
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    _, mappable_nbytes = compute_tier_memory()
    to_load_nbytes = max(0, hardware.context_nbytes - (total - free - reserved))
    to_come_nbytes = to_load_nbytes + hardware.page_table_nbytes(mappable_nbytes)
    return total, max(0, free + reserved - torch.cuda.memory_allocated(device) - to_come_nbytes)


def hardware_of(device: torch.device) -> Hardware:
    """Return a device's achievable rates, and this machine's host memory.

    The rates of a CUDA device are the first of: those that `chunkc calibrate` measured on a device of this name, those
    of the preset for this name, those measured on any other CUDA device, cautious ones.

    Raises:
        OptionsError: the file of measured figures cannot be read.
    """
    host_nbytes, _ = compute_tier_memory()
    if device.type != "cuda":
        return replace(CPU, host_memory_nbytes=host_nbytes)
    properties = torch.cuda.get_device_properties(device)
    found = hardware_by_name(properties.name, properties.total_memory, default_hardware_path())
    # For an AMD device PyTorch returns its architecture's numbers, which would select rules for NVIDIA's devices.
    capability = None if torch.version.hip else (properties.major, properties.minor)
    return replace(found, capability=capability, host_memory_nbytes=host_nbytes)


def hardware_by_name(name: str, memory_nbytes: int, measured: Path) -> Hardware:
    """Look up a CUDA device's rates as `hardware_of` does, without the device.

    Args:
        name: the driver's name for the device.
        memory_nbytes: total memory of the device.
        measured: the file that `chunkc calibrate` writes; need not exist.

    Raises:
        OptionsError: the file cannot be read.
    """
    known = preset_by_name(name, memory_nbytes)
    base = None if known is None else replace(preset(known), device_memory_nbytes=memory_nbytes)
    machine = load_hardware(str(measured)) if measured.exists() else None
    if machine is not None and machine.kind == "cuda" and (base is None or machine.name == name):
        return machine if base is None else replace(machine.over(base), device_memory_nbytes=memory_nbytes)
    if base is not None:
        return base
    cautious = preset(_CAUTIOUS)
    return replace(
        cautious,
        name=name,
        device_memory_nbytes=max(memory_nbytes, cautious.context_nbytes + 1),
        source=f"cautious: the rates of {_CAUTIOUS}, as neither a preset nor `chunkc calibrate` knows this device",
    )


def preset_by_name(name: str, memory_nbytes: int) -> str | None:
    """Return the preset for a device by the driver's name, such as `NVIDIA A100-SXM4-80GB`; None: there is none.

    A preset with much more memory does not fit the device, which is then a part of a card (MIG) or a smaller model.
    """
    text = name.replace("-", " ")
    for pattern, known in _NAMES:
        if re.search(pattern, text, re.IGNORECASE) and memory_nbytes > 0.9 * DATASHEETS[known].memory_nbytes:
            return known
    return None


def granule_of(device: torch.device) -> int:
    """Return the granularity of the device's allocator in bytes."""
    return GRANULE_NBYTES if device.type == "cuda" else 1


def overhead_of(device: torch.device) -> int:
    """Return bytes that every plan leaves on the device: cuBLAS's workspaces, the optimizer's tables."""
    if device.type != "cuda":
        return 0
    workspaces = workspaces_nbytes(*_workspace_sizes(device), shared=shares_workspaces(os.environ))
    return workspaces + rounded_nbytes(TABLES_NBYTES)


def _workspace_sizes(device: torch.device) -> tuple[int, int]:
    """Return bytes of one workspace of cuBLAS and of cuBLASLt: from torch, which has them from PyTorch 2.13 on."""
    if not hasattr(torch.backends.cuda, "cublas_workspace_size"):
        blas = cublas_workspace_nbytes(
            torch.cuda.get_device_capability(device), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        )
        return blas, cublaslt_workspace_nbytes(os.environ.get("CUBLASLT_WORKSPACE_SIZE"))
    with torch.cuda.device(device):
        return torch.backends.cuda.cublas_workspace_size(), torch.backends.cuda.cublaslt_workspace_size()


def device_of(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    """Return the device that all of a model's parameters are on; the CPU if there are none.

    Raises:
        UnsupportedError: they are on several devices, or on one that chunkc does not compute on.
    """
    first: dict[torch.device, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(tensor.device, name)
    if len(first) > 1:
        places = " and ".join(f"{name} is on {device}" for device, name in list(first.items())[:2])
        raise UnsupportedError(f"{places}; a model computes on one device: move all of it there first (`model.to`)")
    device = next(iter(first), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"{first[device]} is on {device}; chunkc computes on the CPU and on CUDA devices")
    return device
