"""The least time that a training step under a budget can take on a machine: what measured steps are held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from models.families import ModelChoice, Sizes

from chunkc.ir.hardware import Hardware
from chunkc.ir.links import TO_DEVICE, TO_HOME
from chunkc.ir.states import DEFAULT_STATES
from chunkc.ir.updates import update_traffic

_NUM_SPLITS = 1000

FORMULA = (
    "max(compute, links, CPU update); compute: 6 FLOPs per token and matrix parameter + 6 x layers x width x length "
    "per token (causal attention), no recomputation; links: parameters that do not fit enter for the forward and for "
    "the backward, their gradients leave; updates of them are shared between device (states enter and leave) and CPU "
    "so that the maximum is least"
)


@dataclass(frozen=True)
class Bound:
    """Seconds per step that each resource needs, and bytes over the links, at the best split of the updates."""

    compute_s: float
    link_s: float
    cpu_update_s: float
    to_device_nbytes: float
    to_home_nbytes: float

    @property
    def step_s(self) -> float:
        """The bound: everything overlaps perfectly."""
        return max(self.compute_s, self.link_s, self.cpu_update_s)

    @property
    def limiting(self) -> str:
        """The resource that decides."""
        times = {"compute": self.compute_s, "links": self.link_s, "CPU update": self.cpu_update_s}
        return max(times, key=lambda name: times[name])


def lower_bound(
    sizes: Sizes, model: ModelChoice, batch_size: int, budget_nbytes: int, hardware: Hardware, device: str
) -> Bound:
    """The bound for AdamW with fp32 masters.

    A budget of B bytes holds at most B / (all bytes per parameter) parameters with gradient and states for good, and
    B / (bytes of a parameter) parameters between forward and backward. Activations are left out, so the bound is
    below what any plan reaches. On a CPU the compute tier is where updates run: all of them are the device's.
    """
    dtype = getattr(torch, model.dtype)
    item_nbytes = dtype.itemsize
    state_nbytes = sum(state.itemsize for state in DEFAULT_STATES.dtypes(dtype).values())
    update_nbytes = sum(stage.nbytes for stage in update_traffic(dtype, DEFAULT_STATES, 1))
    resident = min(sizes.num_parameters, budget_nbytes / (2 * item_nbytes + state_nbytes))
    moving = sizes.num_parameters - resident
    again = max(0.0, sizes.num_parameters - budget_nbytes / item_nbytes)
    rate = hardware.matrix_flops_per_s(dtype, tf32=device == "cuda")
    compute_s = sizes.flops_per_step(batch_size, model.length) / rate
    cpu_rate = hardware.cpu_update_bytes_per_s

    def split(on_device: float) -> Bound:
        inwards = item_nbytes * (moving + again) + on_device * moving * state_nbytes
        outwards = moving * (on_device * (state_nbytes + item_nbytes) + (1 - on_device) * item_nbytes)
        cpu_s = 0.0 if cpu_rate is None else (1 - on_device) * moving * update_nbytes / cpu_rate
        link_s = hardware.link_seconds({TO_DEVICE: inwards, TO_HOME: outwards})
        return Bound(compute_s, link_s, cpu_s, inwards, outwards)

    if device == "cpu" or cpu_rate is None:
        return split(1.0)
    return min((split(part / _NUM_SPLITS) for part in range(_NUM_SPLITS + 1)), key=lambda bound: bound.step_s)
