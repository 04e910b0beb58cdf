"""What an optimizer keeps for a parameter, and dense tensors as their elements lie in memory."""

from __future__ import annotations

import torch

from chunkc.ir.chunks import EXP_AVG, EXP_AVG_SQ, MASTER
from chunkc.session import owner


def state_kinds(parameter: torch.Tensor) -> tuple[str, ...]:
    """The kinds of states that a parameter has."""
    return (EXP_AVG, EXP_AVG_SQ) if parameter.dtype.itemsize >= 4 else (EXP_AVG, EXP_AVG_SQ, MASTER)


def state_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of its moments and master."""
    return parameter.dtype if parameter.dtype.itemsize >= 4 else torch.float32


def like(tensor: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """The tensor with the parameter's strides; itself if it has them."""
    assert tensor is not None
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=tensor.dtype, device=parameter.device).copy_(
        tensor
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in memory order, as a flat view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def offset_in_group(parameter: torch.Tensor) -> int:
    """The parameter's first element in its chunk group; 0 if it is in none."""
    session, name = owner(parameter) or (None, "")
    return 0 if session is None else session.store.layout.offsets.get(name, 0)
