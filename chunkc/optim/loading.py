"""Load optimizer states: check all of them against the optimizer, before any is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chunkc.ir.errors import OptionsError
from chunkc.ir.states import MASTER, MASTER_LOW, StateFormat, is_scale, num_entries, scale_of
from chunkc.ir.strides import dense_strides, is_dense, overlaps_itself
from chunkc.optim.over_ranks import of_this_rank
from chunkc.optim.rule import plain, shown
from chunkc.optim.split_masters import NotedContents
from chunkc.optim.split_masters import load as load_master
from chunkc.optim.states import converted, empty_state
from chunkc.optim.stepping import SteppingOptimizer
from chunkc.runtime.storage.maps import drop_pages, evict_pages
from chunkc.runtime.storage.unassigned import SMALLEST_NBYTES, unassigned_memory_of_parameter
from chunkc.runtime.store.shards import local_shards_in
from chunkc.session.session import managing


@dataclass(frozen=True)
class LoadedState:
    """The states to load for one parameter.

    Attributes:
        step: a whole number.
        tensors: by kind.
    """

    parameter: torch.Tensor
    step: float
    tensors: Mapping[str, torch.Tensor]


def checked_state_dict(optimizer: SteppingOptimizer, state_dict: Mapping[str, Any]) -> list[LoadedState]:
    """Return the states of a state dict in the order of the optimizer's parameters; nothing is changed.

    Raises:
        OptionsError: the state does not fit the optimizer; the message names the parameter, or the parameter group.
    """
    groups = _checked_groups(optimizer, state_dict["param_groups"])
    ids = {number: group for group in groups for number in group["params"]}
    parameters = list(local_shards_in(optimizer.param_groups))
    states = state_dict["state"]
    unknown = [number for number in states if number not in ids]
    if unknown:
        raise OptionsError(f"the loaded state has states of {shown(unknown[0])}, which no loaded parameter group names")
    loaded = []
    for (number, group), parameter in zip(ids.items(), parameters, strict=True):
        if states.get(number):
            try:
                loaded.append(_checked_state(optimizer, parameter, states[number], group))
            except OptionsError as error:
                raise OptionsError(f"the loaded state of {optimizer.title_of(parameter)}: {error}") from None
    return loaded


def load(states: StateFormat, contents: NotedContents, loaded: LoadedState) -> dict[str, Any]:
    """Write loaded states where a parameter's states are kept in a format, and return these.

    Args:
        contents: where a loaded master is noted.
    """
    parameter = loaded.parameter
    state: dict[str, Any] = {"step": torch.tensor(loaded.step, dtype=torch.float32, device="cpu")}
    lacking = {kind for kind in states.kinds if kind not in loaded.tensors}
    lacking |= set(map(scale_of, lacking))
    dtypes = {kind: dtype for kind, dtype in states.dtypes(parameter.dtype).items() if kind not in lacking}
    home = managing(parameter)

    def room(kind: str) -> torch.Tensor:
        if home is None:
            return _room_before_chunks(parameter, kind, dtypes[kind])
        session, name = home
        return session.store.views.home_view(kind, name)

    for kind, source in converted(loaded.tensors, parameter, dtypes).items():
        state[kind] = room(kind)
        if home is None:
            state[kind].copy_(source)
            drop_pages(state[kind])
        else:
            session, name = home
            session.store.write(kind, name, source)
        evict_pages(source)
    if MASTER_LOW in dtypes:
        state[MASTER_LOW] = room(MASTER_LOW)
        load_master(contents, loaded.tensors.get(MASTER), parameter, state[MASTER_LOW])
    elif MASTER in dtypes:
        contents.loaded(parameter, changed=False)
    return state


def _room_before_chunks(parameter: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a state of a parameter that is in no chunk: at home, if the parameter was built there.

    Raises:
        HomeError: the home has no room.
    """
    unassigned_memory = unassigned_memory_of_parameter(parameter)
    if unassigned_memory is None or is_scale(kind) or parameter.numel() * dtype.itemsize < SMALLEST_NBYTES:
        return empty_state(parameter, kind, dtype)
    return unassigned_memory.room_for_state(dtype, parameter.shape, dense_strides(parameter))


def put_aside(loaded: LoadedState, written: Mapping[int, tuple[torch.Tensor, str]]) -> LoadedState:
    """Copy each tensor to load that lies where loading writes another one.

    The optimizer's own state does, if its parameters have changed their order.

    Args:
        written: the parameter and the kind of the states that are overwritten, by address.
    """

    def lies_apart(kind: str, tensor: torch.Tensor) -> bool:
        parameter, written_kind = written.get(tensor.data_ptr(), (None, kind))
        if parameter is None:
            return True
        return (
            parameter is loaded.parameter
            and written_kind == kind
            and tensor.stride() == dense_strides(loaded.parameter)
        )

    tensors = {kind: t if lies_apart(kind, t) else t.clone() for kind, t in loaded.tensors.items()}
    return replace(loaded, tensors=tensors)


def _checked_groups(optimizer: SteppingOptimizer, loaded: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    own = optimizer.param_groups
    if len(loaded) != len(own):
        raise OptionsError(f"the loaded state has {len(loaded)} parameter groups, the optimizer has {len(own)}")
    for number, (group, mine) in enumerate(zip(loaded, own)):
        if len(group["params"]) != len(mine["params"]):
            raise OptionsError(
                f"parameter group {number} has {len(group['params'])} parameters in the loaded state and "
                f"{len(mine['params'])} in the optimizer"
            )
        missing = [
            name for name in optimizer.defaults if name in mine and name not in {*group, *optimizer.rule.optional}
        ]
        if missing:
            raise OptionsError(f"parameter group {number} of the loaded state lacks {', '.join(missing)}")
        try:
            optimizer.check_group(group)
        except OptionsError as error:
            raise OptionsError(f"parameter group {number} of the loaded state: {error}") from error
    return loaded


def _checked_state(
    optimizer: SteppingOptimizer, parameter: torch.Tensor, loaded: Mapping[str, Any], group: Mapping[str, Any]
) -> LoadedState:
    if not isinstance(loaded, Mapping):
        raise OptionsError(f"it is {shown(loaded)}, not a dict")
    moments = optimizer.rule.moments
    unsupported = [kind for kind in loaded if kind not in ("step", MASTER, *moments, *map(scale_of, moments))]
    if unsupported:
        raise OptionsError(
            f"{type(optimizer).__name__} cannot use the state {', '.join(map(str, unsupported))}; load it into the "
            "optimizer that saved it, or begin without it"
        )
    loaded = optimizer.rule.loaded(loaded, group)
    step = plain(loaded["step"], "step")
    if not (step >= 0 and step.is_integer()):
        raise OptionsError(f"step is {shown(loaded['step'])}; allowed: a whole number of at least 0")
    if overlaps_itself(parameter):
        raise OptionsError("several elements of the parameter are one place in memory")
    tensors = {kind: of_this_rank(value, parameter) for kind, value in loaded.items() if kind != "step"}
    for kind, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise OptionsError(f"{kind} is {shown(value)}; allowed: a tensor")
        if value.layout is not torch.strided or value.device.type == "meta":
            raise OptionsError(f"{kind} has no values in memory: its layout is {value.layout} on {value.device}")
        shape = (num_entries(kind, parameter.numel()),) if is_scale(kind) else tuple(parameter.shape)
        if tuple(value.shape) != shape:
            raise OptionsError(f"{kind} has the shape {tuple(value.shape)}, the parameter wants {shape}")
    for kind in (MASTER, *map(scale_of, moments)):
        if kind in tensors and not tensors[kind].dtype.is_floating_point:
            raise OptionsError(f"{kind} is {tensors[kind].dtype}; allowed: a floating-point dtype")
    for kind in (kind for kind in moments if kind in tensors):
        if tensors[kind].is_complex() and parameter.is_complex() and scale_of(kind) not in tensors:
            continue
        _check_moment(kind, tensors[kind], scale_of(kind), has_scale=scale_of(kind) in tensors)
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
