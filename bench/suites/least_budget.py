"""The smallest budget of a model on this machine, as chunkc says before it runs: small runs take theirs from it."""

from __future__ import annotations

from functools import cache

import torch
from measuring import machine
from models.families import ModelChoice, construct

from chunkc.explaining.explain import minimum_budget
from chunkc.ir.hardware import Hardware
from chunkc.machines.devices import hardware_by_name
from chunkc.machines.presets import default_hardware_path, load_hardware

_NONE_FITS_NBYTES = 4096


def hardware_here(device: str) -> Hardware:
    """The machine's CPU, or the GPU that is there, by the driver's name."""
    if device != "cuda":
        return load_hardware("cpu")
    found = machine.hardware()
    return hardware_by_name(found["gpu"], found["gpu_memory_nbytes"], default_hardware_path())


@cache
def least_budget_nbytes(model: ModelChoice, batch_size: int, device: str, codegen: str) -> int:
    """Smallest budget of a model with activation checkpointing, libraries on a GPU included."""
    with torch.device("meta"):
        module = construct(model, is_checkpointed=True)
        x = torch.zeros(batch_size, model.length, dtype=torch.int64)
    return minimum_budget(
        module,
        x,
        x,
        hardware=hardware_here(device),
        codegen=codegen,
        memory_budget=_NONE_FITS_NBYTES,
        activations="keep",
    )
