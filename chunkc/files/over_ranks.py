"""Weights of a model that is cut over ranks, one tensor after the other: whole on rank 0, from the parts of all.

Rank 0 writes, so the files need not be where other ranks see them. Before each tensor all ranks meet. So where rank 0
cannot write any more, the others are told, and do not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from chunkc.ir.errors import FileError
from chunkc.kernels.fused_pass import host_empty
from chunkc.ranks import refuse_tensor_parallel, together, transport_of
from chunkc.runtime.parts import part_of, shards_of
from chunkc.runtime.transport import GATHERS, Transport
from chunkc.torch_private.dtensor import DTensor, local_of

SAVE, LOAD = "chunkc.save()", "chunkc.load()"


def transport_of_module(module: nn.Module, what: str) -> Transport | None:
    """By which ranks meet that train a model; None: one process does.

    Args:
        what: they do, for messages.

    Raises:
        UnsupportedError: some of the parameters are cut over ranks and others are not, or by tensor parallelism too.
    """
    parts = {name: part_of(parameter) for name, parameter in module.named_parameters()}
    refuse_tensor_parallel(parts.values(), what)
    return transport_of(parts)


def whole_on_first(tensor: torch.Tensor, transport: Transport | None) -> torch.Tensor:
    """On rank 0: all of a tensor, in memory that is not the compute tier's; one that is not cut as it is.

    Raises:
        DistributedError: a rank is gone, or does not come.
    """
    if transport is None or not isinstance(tensor, DTensor):
        return tensor
    together(transport, SAVE, lambda: None, FileError)
    shards, local = shards_of(tensor), local_of(tensor).detach()
    room = host_empty((shards.numel,), tensor.dtype)
    spans = {rank: shards.span(part) for part, rank in enumerate(shards.row)}
    begin, end = spans.pop(transport.rank)
    room[begin:end].copy_(local.reshape(-1))
    transport.exchange(GATHERS, [], [(rank, room[begin:end]) for rank, (begin, end) in spans.items()])
    return room.view(tensor.shape)


def send_to_first(tensors: Iterable[torch.Tensor], transport: Transport) -> None:
    """On another rank: its parts of tensors that rank 0 takes with `whole_on_first`, in this order.

    Raises:
        FileError: rank 0 cannot write.
        DistributedError: a rank is gone, or does not come.
    """
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            together(transport, SAVE, lambda: None, FileError)
            if shards_of(tensor).copy == 0:
                transport.exchange(GATHERS, [(0, local_of(tensor).detach().cpu().contiguous())], [])
