"""Optimizers of parameters that are cut over ranks: each rank updates its own parts; state dicts have `DTensor`s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.shards import Shards
from chunkc.ir.states import INT8
from chunkc.kernels.formats import GradScale
from chunkc.optim.rule import OverRanks
from chunkc.optim.split_masters import NotedContents, put_masters_together
from chunkc.ranks import agree, hashed
from chunkc.runtime.parts import Part, part_of
from chunkc.runtime.store import ChunkStore
from chunkc.runtime.transport import Transport
from chunkc.runtime.used_gradients import LocalGradient
from chunkc.torch_private.dtensor import local_of, with_local


def check_over_ranks(optimizer: Any) -> None:
    """Refuse what would need more than a rank's own parts, where parameters are cut over ranks.

    Raises:
        UnsupportedError: states would have 8 bits, or gradients were not exchanged between ranks yet, or layers are
            cut by tensor parallelism, and norms of whole tensors are asked for.
    """
    parts = _parts_of(optimizer)
    if not parts:
        return
    for part in parts:
        if isinstance(gradient := part.grad, LocalGradient):
            raise gradient.refusal()
    if optimizer.rule.num_stages > 1 and any(part.tensor_transport is not None for part in parts):
        raise UnsupportedError(
            f"{type(optimizer).__name__} takes norms of whole tensors, which it does not add up over the ranks of "
            "tensor parallelism: take chunkc.optim.AdamW or SGD"
        )
    refuse_over_ranks(type(optimizer).__name__, optimizer.states.moments)


def note_step(optimizer: Any) -> None:
    """A step begins. Each rank updates its own parts alone; at the next phase ranks compare what steps they have made.

    So a rank that leaves one out, or whose scheduler has gone by its own losses, is an error of all.

    Raises:
        DistributedError: an exchange of this step's gradients has failed.
    """
    transports = {id(part.transport): part.transport for part in _parts_of(optimizer)}
    if transports:
        hyper = [optimizer.hyper_at(group, 1) for group in optimizer.param_groups]
        for transport in transports.values():
            transport.check()
            transport.steps = hashed(f"{transport.steps} {type(optimizer).__name__} {hyper}")


def _parts_of(optimizer: Any) -> list[Part]:
    return [part for group in optimizer.param_groups for p in group["params"] if isinstance(part := part_of(p), Part)]


def refuse_over_ranks(name: str, moments: str) -> None:
    """Refuse an optimizer of that name whose states cannot be cut over ranks.

    Args:
        moments: in what form it keeps them (see `chunkc.ir.states`).

    Raises:
        UnsupportedError: they cannot.
    """
    if moments == INT8:
        raise UnsupportedError(f"{name} updates distributed parameters with fp32 or bf16 moments, not with 8 bits")


def sums_of_group(store: ChunkStore, index: int) -> OverRanks | None:
    """How ranks add up what is to be of whole tensors of a chunk group; None where this rank has all of them."""
    slices = store.layout.groups[index].slices
    placed = {where.offset: where.spec.shards for where in slices if where.spec.shards is not None}
    return _sums(store.transport, placed, tag=index + 1 + _TENSORS_TAG)


def sums_of_tensors(parameters: Mapping[int, torch.Tensor]) -> OverRanks | None:
    """The same for parameters that are in no chunk, by their first elements."""
    parts = {offset: parameter for offset, parameter in parameters.items() if isinstance(parameter, Part)}
    transport = next((part.transport for part in parts.values()), None)
    return _sums(transport, {offset: part.shards for offset, part in parts.items()}, _TENSORS_TAG)


_TENSORS_TAG = 2
"""Of exchanges for tensors in no chunk; each chunk group has one of its own, since threads may update them."""


def _sums(transport: Transport | None, placed: Mapping[int, Shards], tag: int) -> OverRanks | None:
    """Over the ranks of a row that have something of the tensors which are cut; of others each rank has all."""
    cut = [shards for shards in placed.values() if shards.num_ranks > 1]
    if transport is None or not cut:
        return None
    meeting = [rank for part, rank in enumerate(cut[0].row) if any(len(range(*s.rows(part))) for s in cut)]
    if transport.rank not in meeting or len(meeting) == 1:
        return None  # who has nothing of them is not asked
    whole = {offset for offset, shards in placed.items() if shards.num_ranks == 1}

    def add_up(values: torch.Tensor, offsets: Sequence[int]) -> None:
        if transport.rank != meeting[0]:
            for number, offset in enumerate(offsets):
                if offset in whole:
                    values[:, number].zero_()
        transport.add_up(values, meeting, tag)

    return add_up


def agree_on_overflow(optimizer: Any, scale: GradScale) -> None:
    """Where a `GradScaler` may have asked only this rank whether a gradient overflowed, ask all of them.

    PyTorch asks all along those mesh dimensions over which the first of an optimizer's gradients is cut.

    Raises:
        DistributedError: it has overflowed on some ranks alone; nothing is updated.
    """
    if scale.found_inf is None:
        return
    first = next((part for part in _parts_of(optimizer) if part.grad is not None), None)
    if first is None or first.distributed is None:
        return
    found = str(bool(scale.found_inf.cpu()))
    if first.shards.num_ranks == 1 and first.transport.num_ranks > 1:
        agree(first.transport, {f"{_OVERFLOW} (give the optimizer no scalar as its first parameter)": found})
    if first.tensor_transport is not None and any(p == Replicate() for p in first.distributed.placements):
        agree(first.tensor_transport, {f"{_OVERFLOW} (take chunkc.GradScaler, which asks all ranks)": found})


_OVERFLOW = "whether a gradient overflowed"


@contextmanager
def no_exchange(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, ranks that have whole gradients (`zero_stage=1`) keep their own and exchange none."""
    found = {id(p.transport): p.transport for p in parameters if isinstance(p, Part)}.values()
    before = [(transport, transport.accumulating) for transport in found]
    for transport in found:
        transport.accumulating = True
    try:
        yield
    finally:
        for transport, was_accumulating in before:
            transport.accumulating = was_accumulating


def as_saved(noted: NotedContents, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """A hook of `Optimizer.state_dict`: states in the forms in which others know them."""
    put_masters_together(noted, optimizer, state_dict)
    _over_ranks(optimizer, state_dict)


def _over_ranks(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """States of parts as tensors that lie over the ranks as parameters do."""
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(ids, parameters, strict=True):
        part, state = part_of(parameter), state_dict["state"].get(index)
        if isinstance(part, Part) and state is not None:
            state_dict["state"][index] = {
                kind: with_local(parameter, value) if kind != "step" else value for kind, value in state.items()
            }


def of_this_rank(value: Any, parameter: torch.Tensor) -> Any:
    """What a loaded state has of a parameter's part.

    Raises:
        OptionsError: it is cut over ranks, and the parameter is not, or in another way.
    """
    if not isinstance(value, DTensor):
        return value
    whole = parameter.distributed if isinstance(parameter, Part) else None
    if whole is None or (tuple(value.placements), value.shape) != (tuple(whole.placements), whole.shape):
        raise OptionsError("a state is cut over ranks in another way than the parameter: redistribute it before")
    return local_of(value)
