"""The norm of all gradients, without a copy of any: they may be larger than what the device has left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

PIECE_NUMEL = 1 << 16
"""A CPU sums up 16-bit elements in fp32 by making a copy of them first: of so many at a time."""


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that there are."""
    return [p.grad for p in parameters if p.grad is not None]


@torch.no_grad()
def global_norm(gradients: Sequence[torch.Tensor]) -> float:
    """The Euclidean norm of all elements, summed up in fp32, as DeepSpeed's (`get_global_norm`).

    Inf or NaN where an element is, or where squares overflow. Waits for the device.
    """
    if not gradients:
        return 0.0
    norms = [_norm(gradient) for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])))


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.dtype == torch.float32 or gradient.device.type != "cpu":
        return torch.linalg.vector_norm(gradient, dtype=torch.float32)
    # In memory order: a transposed gradient is a view of a contiguous one.
    dense = gradient.permute(sorted(range(gradient.dim()), key=gradient.stride, reverse=True))
    flat = dense.view(-1) if dense.is_contiguous() else dense.reshape(-1)
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in flat.split(PIECE_NUMEL)])
    )


@torch.no_grad()
def all_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Whether no element is Inf or NaN; for where squares have overflowed."""
    for gradient in gradients:
        smallest, largest = gradient.aminmax() if gradient.numel() else (gradient.new_zeros(()),) * 2
        if not bool(torch.isfinite(smallest) & torch.isfinite(largest)):
            return False
    return True
