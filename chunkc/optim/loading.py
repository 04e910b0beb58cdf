"""A state that is to be loaded, checked against an optimizer: all of it, before any of it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chunkc.ir.errors import OptionsError
from chunkc.ir.states import EXP_AVG, EXP_AVG_SCALE, EXP_AVG_SQ, EXP_AVG_SQ_SCALE, MASTER, SCALES, num_entries
from chunkc.ir.strides import dense_strides, is_dense, overlaps_itself
from chunkc.optim.memory import title_of
from chunkc.optim.states import KNOWN
from chunkc.optim.values import plain, shown

_OPTIONAL = ("maximize",)
"""What a saved parameter group may lack, as older versions of `torch.optim` have saved none."""


@dataclass(frozen=True)
class LoadedState:
    """What is to be loaded for one parameter.

    Attributes:
        step: a whole number.
        tensors: by kind.
    """

    parameter: torch.Tensor
    step: float
    tensors: Mapping[str, torch.Tensor]


def checked_state_dict(optimizer: Any, state_dict: Mapping[str, Any]) -> list[LoadedState]:
    """The states of a state dict in the order of the optimizer's parameters; nothing is changed.

    Raises:
        OptionsError: the state does not fit the optimizer; the message names the parameter, or the parameter group.
    """
    groups = _checked_groups(optimizer, state_dict["param_groups"])
    ids = [number for group in groups for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = state_dict["state"]
    unknown = [number for number in states if number not in set(ids)]
    if unknown:
        raise OptionsError(f"the loaded state has states of {shown(unknown[0])}, which no loaded parameter group names")
    pairs = zip(ids, parameters, strict=True)
    return [_checked(optimizer, parameter, states[number]) for number, parameter in pairs if states.get(number)]


def put_aside(loaded: LoadedState, places: Mapping[int, tuple[torch.Tensor, str]]) -> LoadedState:
    """The same, with a copy of each tensor that lies where loading writes something else.

    So does an optimizer's own state whose parameters have changed their order.

    Args:
        places: the parameter and the kind of the states that are written over, by address.
    """

    def lies_apart(kind: str, tensor: torch.Tensor) -> bool:
        owner, found = places.get(tensor.data_ptr(), (None, kind))
        if owner is None:
            return True
        return owner is loaded.parameter and found == kind and tensor.stride() == dense_strides(loaded.parameter)

    tensors = {kind: t if lies_apart(kind, t) else t.clone() for kind, t in loaded.tensors.items()}
    return replace(loaded, tensors=tensors)


def _checked_groups(optimizer: Any, loaded: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    own = optimizer.param_groups
    if len(loaded) != len(own):
        raise OptionsError(f"the loaded state has {len(loaded)} parameter groups, the optimizer has {len(own)}")
    for number, (group, mine) in enumerate(zip(loaded, own)):
        if len(group["params"]) != len(mine["params"]):
            raise OptionsError(
                f"parameter group {number} has {len(group['params'])} parameters in the loaded state and "
                f"{len(mine['params'])} in the optimizer"
            )
        missing = [name for name in optimizer.defaults if name in mine and name not in {*group, *_OPTIONAL}]
        if missing:
            raise OptionsError(f"parameter group {number} of the loaded state lacks {', '.join(missing)}")
        try:
            optimizer.check_group(group)
        except OptionsError as error:
            raise OptionsError(f"parameter group {number} of the loaded state: {error}") from error
    return loaded


def _checked(optimizer: Any, parameter: torch.Tensor, loaded: Mapping[str, Any]) -> LoadedState:
    try:
        return _checked_state(optimizer, parameter, loaded)
    except OptionsError as error:
        raise OptionsError(f"the loaded state of {title_of(optimizer, parameter)}: {error}") from None


def _checked_state(optimizer: Any, parameter: torch.Tensor, loaded: Mapping[str, Any]) -> LoadedState:
    if not isinstance(loaded, Mapping):
        raise OptionsError(f"it is {shown(loaded)}, not a dict")
    unsupported = [kind for kind in loaded if kind not in KNOWN]
    if unsupported:
        raise OptionsError(
            f"{type(optimizer).__name__} cannot use the state {', '.join(map(str, unsupported))}; load it into the "
            "optimizer that saved it, or begin without it"
        )
    missing = [kind for kind in ("step", EXP_AVG, EXP_AVG_SQ) if kind not in loaded]
    if missing:
        raise OptionsError(f"it lacks {', '.join(missing)}")
    step = plain(loaded["step"], "step")
    if not (step >= 0 and step.is_integer()):
        raise OptionsError(f"step is {shown(loaded['step'])}; allowed: a whole number of at least 0")
    if overlaps_itself(parameter):
        raise OptionsError("several elements of the parameter are one place in memory")
    tensors = {kind: value for kind, value in loaded.items() if kind != "step"}
    for kind, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise OptionsError(f"{kind} is {shown(value)}; allowed: a tensor")
        if value.layout is not torch.strided or value.device.type == "meta":
            raise OptionsError(f"{kind} has no values in memory: its layout is {value.layout} on {value.device}")
        shape = (num_entries(kind, parameter.numel()),) if kind in SCALES else tuple(parameter.shape)
        if tuple(value.shape) != shape:
            raise OptionsError(f"{kind} has the shape {tuple(value.shape)}, the parameter wants {shape}")
    for kind in (MASTER, EXP_AVG_SCALE, EXP_AVG_SQ_SCALE):
        if kind in tensors and not tensors[kind].dtype.is_floating_point:
            raise OptionsError(f"{kind} is {tensors[kind].dtype}; allowed: a floating-point dtype")
    for kind, scale in ((EXP_AVG, EXP_AVG_SCALE), (EXP_AVG_SQ, EXP_AVG_SQ_SCALE)):
        _check_moment(kind, tensors[kind], scale, has_scale=scale in tensors)
    return LoadedState(parameter, step, tensors)


def _check_moment(kind: str, moment: torch.Tensor, scale: str, *, has_scale: bool) -> None:
    if not has_scale:
        if not moment.dtype.is_floating_point:
            raise OptionsError(f"{kind} is {moment.dtype} without {scale}; allowed: a floating-point dtype")
        return
    if moment.dtype != torch.uint8:
        raise OptionsError(f"{kind} is {moment.dtype} with {scale}; allowed: 8-bit moments in torch.uint8")
    if not is_dense(moment):
        raise OptionsError(f"{kind} has 8-bit moments with gaps between them, which {scale} cannot be matched to")
