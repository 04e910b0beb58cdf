"""Weights of a model that is cut over ranks, one tensor after the other: whole on rank 0, from the parts of all.

Rank 0 writes, so the files need not be where other ranks see them. Before each tensor all ranks meet. So where rank 0
cannot write any more, the others are told, and do not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from chunkc.distributed.agreement import together, transport_of
from chunkc.ir.errors import FileError
from chunkc.kernels.fused_pass import host_empty
from chunkc.runtime.distributed.transport import GATHERS, Message, Transport
from chunkc.runtime.store.shards import LocalShard, block_of, local_shard_of
from chunkc.torch_private.dtensor import DTensor, local_of

SAVE, LOAD = "chunkc.save()", "chunkc.load()"


def transport_of_module(module: nn.Module) -> Transport | None:
    """By which all ranks meet that train a model; None: one process does.

    Raises:
        UnsupportedError: some of the parameters are cut over ranks and others are not.
    """
    parts = {name: local_shard_of(parameter) for name, parameter in module.named_parameters()}
    transport_of(parts)
    return next((part.world for part in parts.values() if isinstance(part, LocalShard)), None)


def whole_on_first(tensor: torch.Tensor, transport: Transport | None) -> torch.Tensor:
    """Gather a tensor on rank 0, into memory that is not the compute tier's; return one that is not sharded as it is.

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
        else:  # parts of rows
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
