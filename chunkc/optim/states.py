"""Make the states that an optimizer keeps for a parameter, and convert them from one format into another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from chunkc.ir.states import MASTER, MASTER_LOW, UNSIGNED, is_scale, num_entries, scale_of
from chunkc.ir.strides import dense_strides
from chunkc.kernels.quant import dequantise, quantise
from chunkc.session.session import Session, owner

Dtypes = Mapping[str, torch.dtype]
"""Kinds of states of a parameter -> their dtypes (see `chunkc.ir.states.StateFormat.dtypes`)."""


def tensor_of(value: Any) -> torch.Tensor:
    """Return a loaded state as a tensor: a tensor as it is, anything else on the CPU.

    `torch.as_tensor` would move tensors to the default device.
    """
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


def empty_state(parameter: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a state on its parameter's device, uninitialised; dense in the parameter's order, or flat for scales."""
    if is_scale(kind):
        return torch.empty(num_entries(kind, parameter.numel()), dtype=dtype, device=parameter.device)
    return torch.empty_strided(parameter.shape, dense_strides(parameter), dtype=dtype, device=parameter.device)


def initialise(kind: str, state: torch.Tensor, parameter: torch.Tensor) -> None:
    """Fill a state as before the first update: a master with the parameter, all else with zeros."""
    if kind == MASTER:
        state.copy_(parameter)
    else:
        state.zero_()


def has_states(state: Mapping[str, Any], parameter: torch.Tensor, dtypes: Dtypes) -> bool:
    """Whether a parameter's states exist in these kinds and dtypes, dense in the parameter's order."""
    if len(state) != 1 + len(dtypes):
        return False
    shape, strides = parameter.shape, dense_strides(parameter)
    for kind, dtype in dtypes.items():
        tensor = state.get(kind)
        if tensor is None or tensor.dtype != dtype:
            return False
        if not is_scale(kind) and (tensor.shape != shape or tensor.stride() != strides):
            return False
    return True


def make_states_on_tier(state: dict[str, Any], parameter: torch.Tensor, dtypes: Dtypes) -> None:
    """Make the states of a parameter that does not move, in place; convert those that have another format."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
    kept = {kind: dtype for kind, dtype in dtypes.items() if kind in state or kind in (MASTER, MASTER_LOW)}
    sources = converted(state, parameter, kept) if any(kind in state for kind in dtypes) else {}
    for kind, dtype in dtypes.items():
        state[kind] = empty_state(parameter, kind, dtype)
        if kind in sources:
            state[kind].copy_(sources[kind])
        else:
            initialise(kind, state[kind], parameter)


def converted(state: Mapping[str, Any], parameter: torch.Tensor, dtypes: Dtypes) -> dict[str, torch.Tensor]:
    """Convert a state of any format to these kinds, for the caller to copy; copying may still round to the dtypes.

    8-bit moments are returned as they are where 8-bit moments of the same memory layout are asked for. Lower bits of a
    master are returned as they are, or left to `chunkc.optim.split_masters.load`.

    Raises:
        ValueError: a kind is missing.
    """
    sources: dict[str, torch.Tensor] = {}
    for kind, dtype in dtypes.items():
        if is_scale(kind) or (kind == MASTER_LOW and kind not in state):
            continue
        source = state.get(kind, parameter if kind == MASTER else None)
        if source is None:
            raise ValueError(f"the loaded state lacks {kind}")
        source = tensor_of(source)
        scale = state.get(scale_of(kind))
        signed = kind not in UNSIGNED
        if dtype == torch.uint8 and scale is not None and source.stride() == dense_strides(parameter):
            sources |= {kind: source, scale_of(kind): tensor_of(scale)}
            continue
        if scale is not None:
            values = dequantise(flat(source), torch.as_tensor(scale, device=source.device), signed=signed)
            source = values.as_strided(source.shape, source.stride())
        if dtype == torch.uint8:
            wide = empty_state(parameter, kind, torch.float32).copy_(source)
            codes, scales = quantise(flat(wide), signed=signed)
            sources |= {kind: codes.as_strided(wide.shape, wide.stride()), scale_of(kind): scales}
        else:
            sources[kind] = source
    return sources


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements in memory order, as a flat view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the elements of the parameter or its gradient in the order of its states, as a view where possible."""
    strides = dense_strides(parameter)
    if tensor.stride() == strides and not tensor.is_neg() and not tensor.is_conj():
        return flat(tensor)
    return flat(torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor))


def real_parts(elements: torch.Tensor) -> torch.Tensor:
    """View complex elements of a flat tensor as twice as many real ones; return others as they are."""
    return torch.view_as_real(elements).view(-1) if elements.is_complex() else elements


def put_back(elements: torch.Tensor, parameter: torch.Tensor) -> None:
    """Write elements that `flat_like` returned back to the parameter, if they are a copy."""
    if elements.data_ptr() != parameter.data_ptr():
        if parameter.is_complex():
            elements = torch.view_as_complex(elements.view(-1, 2))
        parameter.copy_(elements.as_strided(parameter.shape, dense_strides(parameter)))


def place_in_group(parameter: torch.Tensor) -> tuple[int, int] | None:
    """Return the parameter's chunk group and its first element in it; None if it is in no group."""
    session, name = owner(parameter) or (None, "")
    if session is None or name not in session.store.layout.offsets:
        return None
    return session.store.views.group_index(name), session.store.layout.offsets[name]


def names_at_home(parameters: Iterable[torch.Tensor]) -> dict[tuple[Session, int], list[str]]:
    """Return the names of those parameters that are at home, by session and chunk group."""
    names: dict[tuple[Session, int], list[str]] = {}
    for parameter in parameters:
        session, name = owner(parameter) or (None, "")
        if session is not None and session.store.views.is_managed(name):
            names.setdefault((session, session.store.views.group_index(name)), []).append(name)
    return names
