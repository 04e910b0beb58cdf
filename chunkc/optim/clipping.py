"""Note which gradients a clipping factor was computed from, and whether they are still the same.

`.grad` keeps what the backward computed: an update multiplies gradients by the factor. A factor holds for the gradients
that it was computed from. If they are changed afterwards, by a backward, by hand or otherwise, their version counters
tell, or how often a backward has written them home.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from chunkc.kernels.host_memory import host_tensor
from chunkc.session.session import managing

EPS = 1e-6
"""The number added to a norm before it divides, as in PyTorch."""

SAME, CHANGED, REPLACED = "same", "changed", "replaced"
"""States of a gradient since it was clipped: unchanged; with other values; another tensor."""


@dataclass(frozen=True)
class ClippedGradient:
    """A gradient, and how often it had been written when it was clipped.

    Attributes:
        version: its version counter.
        num_written: writes of backwards into its home.
    """

    gradient: weakref.ref[torch.Tensor]
    version: int
    num_written: int

    @staticmethod
    def of(parameter: torch.Tensor, gradient: torch.Tensor) -> ClippedGradient:
        return ClippedGradient(weakref.ref(gradient), gradient._version, _num_written(parameter))

    def status(self, parameter: torch.Tensor, gradient: torch.Tensor) -> str:
        if self.gradient() is not gradient:
            return REPLACED
        return SAME if (self.version, self.num_written) == (gradient._version, _num_written(parameter)) else CHANGED


def _num_written(parameter: torch.Tensor) -> int:
    """Return how often gradients of the parameter's group were written home."""
    home = managing(parameter)
    return 0 if home is None else home[0].store.sums.written[home[0].store.views.group_index(home[1])]


@dataclass
class Clipped:
    """A clipping factor, and the gradients that it is for, by the id of their parameter.

    Attributes:
        norm: the norm of the gradients, before they are clipped.
        factor: 0-dim fp32.
        stepped: whether a step has multiplied the gradients.
    """

    norm: torch.Tensor
    factor: torch.Tensor
    gradients: dict[int, ClippedGradient]
    stepped: bool = False

    def statuses(self, gradients: list[tuple[torch.Tensor, torch.Tensor]]) -> set[str]:
        """Return the statuses of gradients, which are given with their parameters."""
        clipped = [(self.gradients.get(id(parameter)), parameter, gradient) for parameter, gradient in gradients]
        return {REPLACED if c is None else c.status(parameter, gradient) for c, parameter, gradient in clipped}


def kept_value(value: torch.Tensor) -> torch.Tensor:
    """Copy a CPU number that outlives this call out of torch's memory, which may be planned to the byte."""
    return host_tensor(value.numpy(), value.numpy().dtype) if value.device.type == "cpu" else value
