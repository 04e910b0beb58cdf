"""Gather the weights of a sharded model on rank 0, one tensor after the other.

Only rank 0 writes, so other ranks need not see the files. All ranks meet before each tensor: if rank 0 cannot write,
the others learn it there and do not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from chunkc.distributed.agreement import together, transport_of
from chunkc.ir.errors import FileError
from chunkc.kernels.host_memory import host_empty
from chunkc.runtime.distributed.transport import GATHERS, Message, Transport
from chunkc.runtime.store.shards import LocalShard, block_of, local_shard_of
from chunkc.torch_private.dtensor import DTensor, local_of

SAVE, LOAD = "chunkc.save()", "chunkc.load()"


def transport_of_module(module: nn.Module) -> Transport | None:
    """Find the transport of all ranks that train a model; None: the model is not sharded.

    Raises:
        UnsupportedError: some parameters are sharded and others are not, or over other ranks.
    """
    parts = {name: local_shard_of(parameter) for name, parameter in module.named_parameters()}
    transport_of(parts)
    return next((part.world for part in parts.values() if isinstance(part, LocalShard)), None)


def whole_on_first(tensor: torch.Tensor, transport: Transport | None) -> torch.Tensor:
    """Gather a sharded tensor on rank 0, into memory outside the compute tier; return any other tensor as it is.

    Only rank 0 calls this; meanwhile the others call `send_to_first`.

    Raises:
        DistributedError: a rank is gone, or does not come.
    """
    if transport is None or not isinstance(tensor, DTensor):
        return tensor
    together(transport, SAVE, lambda: None, FileError)
    whole = host_empty((tensor.numel(),), tensor.dtype).view(tensor.shape)
    receives: list[Message] = []
    for rank in range(transport.num_ranks):
        block = block_of(tensor, rank)
        place = whole[block.slices]
        if not block.is_first:
            continue
        if rank == transport.rank:
            place.copy_(local_of(tensor).detach())
        elif place.is_contiguous():
            receives.append((rank, place))
        else:  # parts of rows: messages are contiguous, so these go through a buffer
            received = host_empty((block.numel,), tensor.dtype).view(block.sizes)
            transport.exchange(GATHERS, [], [(rank, received)])
            place.copy_(received)
    transport.exchange(GATHERS, [], receives)
    return whole


def send_to_first(tensors: Iterable[torch.Tensor], transport: Transport) -> None:
    """Send this rank's shards of the tensors that rank 0 gathers with `whole_on_first`, in the same order.

    Raises:
        FileError: rank 0 cannot write.
        DistributedError: a rank is gone, or does not come.
    """
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            together(transport, SAVE, lambda: None, FileError)
            if block_of(tensor).is_first:
                transport.exchange(GATHERS, [(0, local_of(tensor).detach().cpu().contiguous())], [])
