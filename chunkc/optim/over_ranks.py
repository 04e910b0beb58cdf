"""Update parameters that are cut over ranks: each rank its own shards; state dicts have `DTensor`s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from chunkc.distributed.agreement import Facts, agree, hashed
from chunkc.ir.blocks import Block
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.states import INT8
from chunkc.kernels.formats import GradScale
from chunkc.optim.rule import OverRanks
from chunkc.optim.split_masters import put_masters_together
from chunkc.optim.stepping import SteppingOptimizer
from chunkc.runtime.distributed.transport import Transport
from chunkc.runtime.store.consumed_gradients import LocalGradient
from chunkc.runtime.store.shards import LocalShard, block_of, leaf_of, local_shard_of, local_shards_in, shard_like
from chunkc.runtime.store.store import ChunkStore
from chunkc.torch_private.dtensor import local_of, with_local


def begin_step(optimizer: SteppingOptimizer) -> None:
    """Note that a step begins. Each rank updates its own shards; at the next phase ranks compare the steps they made.

    So a rank that skips a step, or has a learning rate that depends on its own losses, is an error on all ranks.

    Raises:
        UnsupportedError: states would have 8 bits, or gradients were not exchanged between ranks yet.
        DistributedError: an exchange of this step's gradients has failed.
    """
    parts = _parts_of(optimizer)
    if not parts:
        return
    for part in parts:
        if isinstance(gradient := part.grad, LocalGradient):
            raise gradient.refusal()
    refuse_over_ranks(type(optimizer).__name__, optimizer.states.moments)
    hyper = [optimizer.hyper_at(group, 1) for group in optimizer.param_groups]
    for transport in {id(part.transport): part.transport for part in parts}.values():
        transport.check()
        transport.world.check()
        transport.steps = hashed(f"{transport.steps} {type(optimizer).__name__} {hyper}")


def _parts_of(optimizer: SteppingOptimizer) -> list[LocalShard]:
    return [part for part in local_shards_in(optimizer.param_groups) if isinstance(part, LocalShard)]


def refuse_over_ranks(name: str, moments: str) -> None:
    """Refuse an optimizer if its states cannot be cut over ranks.

    Args:
        name: the optimizer's name.
        moments: the format of its moments (see `chunkc.ir.states`).

    Raises:
        UnsupportedError: they cannot.
    """
    if moments == INT8:
        raise UnsupportedError(f"{name} updates distributed parameters with fp32 or bf16 moments, not with 8 bits")


def ranks_of_norms(optimizer: SteppingOptimizer) -> Transport | None:
    """Return the transport for a rendezvous before a step that adds up norms; None if none is needed.

    Ranks of tensor parallelism need one: they do not plan together."""
    part = next(iter(_parts_of(optimizer)), None)
    return part.world if part is not None and part.is_tensor_parallel and optimizer.rule.num_stages > 1 else None


def order_of_norms(optimizer: SteppingOptimizer, prepared: Iterable[Any]) -> Facts:
    """Return the facts that such ranks compare, so that all add up the same tensors in the same order.

    Args:
        prepared: as `step.prepare_step` returns it.
    """
    order = [
        [
            sorted((update.group, *(task.name for task in update.tasks)) for update in part.updates),
            sorted(update.group for update in part.at_home),
        ]
        for part in prepared
    ]
    name = type(optimizer).__name__
    return {f"the chunks that {name} updates (give all the same chunk_size, or take chunkc.optim.AdamW)": repr(order)}


def sums_of_group(store: ChunkStore, index: int) -> OverRanks | None:
    """Return the sum over ranks for whole tensors of a chunk group; None: this rank has all of them."""
    parameters = [(s.offset, store.views.parameter(s.spec.name)) for s in store.layout.groups[index].slices]
    return _sums(parameters, tag=index + 1 + _TENSORS_TAG)


def sums_of_tensors(parameters: Mapping[int, torch.Tensor]) -> OverRanks | None:
    """Return the sum over ranks for parameters that are in no chunk, by their first elements."""
    return _sums(list(parameters.items()), _TENSORS_TAG)


_TENSORS_TAG = 2
"""Tag of exchanges for tensors in no chunk. Each chunk group has a tag of its own, since threads may update them."""


def _sums(parameters: Sequence[tuple[int, torch.Tensor]], tag: int) -> OverRanks | None:
    """Return the sum over the ranks that have elements of these tensors; if all shards have copies, over one row.

    Elements that several ranks have alike are counted once.
    """
    parts = [(offset, part) for offset, part in parameters if isinstance(part, LocalShard)]
    if not parts:
        return None
    world, num_rows = parts[0][1].world, parts[0][1].transport.num_copies
    size = world.num_ranks // num_rows
    first = world.rank // size * size
    blocks = [(offset, _blocks(part, range(first, first + size))) for offset, part in parts]
    rendezvous = [first + at for at in range(size) if any(of_ranks[at].numel for _, of_ranks in blocks)]
    if (
        world.rank not in rendezvous
        or len(rendezvous) == 1
        or all(b.is_whole for _, of_ranks in blocks for b in of_ranks)
    ):
        return None  # a rank without elements takes no part, nor does one with all of them
    here = world.rank - first
    again = {
        offset
        for offset, of_ranks in blocks
        if of_ranks[here].numel and any(b.ranges == of_ranks[here].ranges for b in of_ranks[:here])
    }

    def add_up(values: torch.Tensor, offsets: Sequence[int]) -> None:
        for number, offset in enumerate(offsets):
            if offset in again:
                values[:, number].zero_()
        world.add_up(values, rendezvous, tag)

    return add_up


def _blocks(part: LocalShard, ranks: Iterable[int]) -> list[Block]:
    """Return the blocks of a parameter that ranks have."""
    whole: Any = leaf_of(part)
    return [block_of(whole, rank) for rank in ranks]


def agree_on_overflow(optimizer: SteppingOptimizer, scale: GradScale) -> None:
    """Compare over all ranks whether a gradient overflowed, if a `GradScaler` may have asked this rank only.

    PyTorch asks all ranks along those mesh dimensions over which the first of an optimizer's gradients is cut.

    Raises:
        DistributedError: a gradient has overflowed on some ranks only; nothing is updated.
    """
    if scale.found_inf is None:
        return
    first = next((part for part in _parts_of(optimizer) if part.grad is not None), None)
    if first is None or first.distributed is None:
        return
    overflowed = str(bool(scale.found_inf.cpu()))
    if first.is_tensor_parallel:
        if any(p == Replicate() for p in first.distributed.placements):
            agree(first.world, {f"{_OVERFLOW} (take chunkc.GradScaler, which asks all ranks)": overflowed})
    elif first.shards.num_ranks == 1 and first.transport.num_ranks > 1:
        agree(first.transport, {f"{_OVERFLOW} (give the optimizer no scalar as its first parameter)": overflowed})


_OVERFLOW = "whether a gradient overflowed"


@contextmanager
def no_exchange(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let ranks that have whole gradients (`zero_stage=1`) keep their own inside, and exchange none."""
    transports = {id(p.transport): p.transport for p in parameters if isinstance(p, LocalShard)}.values()
    before = [(transport, transport.accumulating) for transport in transports]
    for transport in transports:
        transport.accumulating = True
    try:
        yield
    finally:
        for transport, was_accumulating in before:
            transport.accumulating = was_accumulating


def as_saved(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Convert states to the formats of `torch.optim`: a hook of `Optimizer.state_dict`."""
    put_masters_together(optimizer, state_dict)
    _over_ranks(optimizer, state_dict)


def _over_ranks(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace states of shards by `DTensor`s that are cut over the ranks as the parameters are."""
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(ids, parameters, strict=True):
        part, state = local_shard_of(parameter), state_dict["state"].get(index)
        if isinstance(part, LocalShard) and state is not None:
            state_dict["state"][index] = {
                kind: with_local(parameter, value) if kind != "step" else value for kind, value in state.items()
            }


def of_this_rank(value: Any, parameter: torch.Tensor) -> Any:
    """Return this rank's shard of a loaded state that is cut as the parameter is, or whole.

    Raises:
        OptionsError: the state is cut over ranks, and the parameter is not, or in another way.
    """
    whole = parameter.distributed if isinstance(parameter, LocalShard) else None
    if not isinstance(value, DTensor):
        if whole is None or not isinstance(value, torch.Tensor) or value.shape != whole.shape:
            return value
        return local_of(shard_like(value, whole))
    if whole is None or (tuple(value.placements), value.shape) != (tuple(whole.placements), whole.shape):
        raise OptionsError("a state is cut over ranks in another way than the parameter: redistribute it before")
    return local_of(value)
