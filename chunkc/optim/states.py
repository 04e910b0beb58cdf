"""What an optimizer keeps for a parameter: made, and converted from one form into another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from chunkc.ir.layout import GRAD, PARAM
from chunkc.ir.states import MASTER, MASTER_LOW, UNSIGNED, is_scale, num_entries, scale_of
from chunkc.ir.strides import dense_strides
from chunkc.kernels.quant import dequantise, quantise
from chunkc.session.session import Session, owner

Dtypes = Mapping[str, torch.dtype]
"""The kinds of states that a parameter has, with their dtypes (see `chunkc.ir.states.StateFormat.dtypes`)."""


def tensor_of(value: Any) -> torch.Tensor:
    """A state as it was loaded: a tensor where it is, anything else as a tensor on the CPU.

    `torch.as_tensor` would move tensors to the default device.
    """
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


def empty_state(parameter: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Room for a state beside its parameter, uninitialised; dense in the parameter's order, or flat for scales."""
    if is_scale(kind):
        return torch.empty(num_entries(kind, parameter.numel()), dtype=dtype, device=parameter.device)
    return torch.empty_strided(parameter.shape, dense_strides(parameter), dtype=dtype, device=parameter.device)


def initialise(kind: str, state: torch.Tensor, parameter: torch.Tensor) -> None:
    """The state before the first update: a master is the parameter, all else zeros."""
    if kind == MASTER:
        state.copy_(parameter)
    else:
        state.zero_()


def is_kept(state: Mapping[str, Any], parameter: torch.Tensor, dtypes: Dtypes) -> bool:
    """Whether a state is there in these kinds and dtypes, dense in the parameter's order."""
    if len(state) != 1 + len(dtypes):
        return False
    shape, strides = parameter.shape, dense_strides(parameter)
    for kind, dtype in dtypes.items():
        found = state.get(kind)
        if found is None or found.dtype != dtype:
            return False
        if not is_scale(kind) and (found.shape != shape or found.stride() != strides):
            return False
    return True


def made_on_tier(state: dict[str, Any], parameter: torch.Tensor, dtypes: Dtypes) -> dict[str, Any]:
    """The state of a parameter that does not move, in place: made on its first update, converted where it differs."""
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
    return state


def converted(state: Mapping[str, Any], parameter: torch.Tensor, dtypes: Dtypes) -> dict[str, torch.Tensor]:
    """A state in any form as one of these kinds: what is to be copied, which may still round to the dtypes.

    8-bit moments stay as they are if they stay 8-bit moments of a parameter laid out alike. Lower bits of a master are
    taken as they are, or left to `chunkc.optim.split_masters.load`.

    Raises:
        ValueError: a kind is missing.
    """
    found: dict[str, torch.Tensor] = {}
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
            found |= {kind: source, scale_of(kind): tensor_of(scale)}
            continue
        if scale is not None:
            values = dequantise(flat(source), torch.as_tensor(scale, device=source.device), signed=signed)
            source = values.as_strided(source.shape, source.stride())
        if dtype == torch.uint8:
            wide = empty_state(parameter, kind, torch.float32).copy_(source)
            codes, scales = quantise(flat(wide), signed=signed)
            found |= {kind: codes.as_strided(wide.shape, wide.stride()), scale_of(kind): scales}
        else:
            found[kind] = source
    return found


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in memory order, as a flat view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def flat_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The elements of the parameter, or of its gradient, in the order that its states have: a view where it can be."""
    strides = dense_strides(parameter)
    if tensor.stride() == strides and not tensor.is_neg() and not tensor.is_conj():
        return flat(tensor)
    return flat(torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor))


def real_parts(elements: torch.Tensor) -> torch.Tensor:
    """Complex elements in a flat tensor as a view of twice as many real ones; others as they are."""
    return torch.view_as_real(elements).view(-1) if elements.is_complex() else elements


def flats_of(parameter: torch.Tensor, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All that an update of a parameter needs, as flat tensors of real numbers; `put_back` the parameter's after it."""
    assert parameter.grad is not None
    flats = {PARAM: flat_like(parameter, parameter), GRAD: flat_like(parameter.grad, parameter)}
    return {kind: real_parts(tensor) for kind, tensor in (flats | {k: flat(s) for k, s in states.items()}).items()}


def put_back(elements: torch.Tensor, parameter: torch.Tensor) -> None:
    """Write the parameter's elements as `flat_like` gave them, where they are not the parameter's own memory."""
    if elements.data_ptr() != parameter.data_ptr():
        if parameter.is_complex():
            elements = torch.view_as_complex(elements.view(-1, 2))
        parameter.copy_(elements.as_strided(parameter.shape, dense_strides(parameter)))


def place_in_group(parameter: torch.Tensor) -> tuple[int, int] | None:
    """The parameter's chunk group and its first element in it; None if it is in none."""
    session, name = owner(parameter) or (None, "")
    if session is None or name not in session.store.layout.offsets:
        return None
    return session.store.group_index(name), session.store.layout.offsets[name]


def names_at_home(parameters: Iterable[torch.Tensor]) -> dict[tuple[Session, int], list[str]]:
    """The names of those parameters that are at home, by session and chunk group."""
    found: dict[tuple[Session, int], list[str]] = {}
    for parameter in parameters:
        session, name = owner(parameter) or (None, "")
        if session is not None and session.store.is_managed(name):
            found.setdefault((session, session.store.group_index(name)), []).append(name)
    return found
