"""Send bytes between ranks: messages from memory to memory, in the same order on every rank.

Messages on a GPU go by NCCL, in stream order (`runtime.distributed.nccl`); all others by gloo, and the caller waits for
them. Each channel is a process group of its own, so that threads on different channels do not wait for each other.
Messages are sent and received in place, without buffers, so a rank sends exactly the bytes that other ranks lack,
whatever the sizes of their shards are. A channel's exchanges are matched by their order, and where threads share one,
by their tags.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from chunkc.ir.errors import DistributedError
from chunkc.runtime.distributed.nccl import GpuMessages

GATHERS, SCATTERS, AGREEMENTS, SUMS, CHECKPOINTS = "gathers", "scatters", "agreements", "sums", "checkpoints"
_CHANNELS = (GATHERS, SCATTERS, AGREEMENTS, SUMS, CHECKPOINTS)

_HEAD_NBYTES = 1024
"""First bytes of a gathered value, with its length: mostly these are the whole value."""

_INLINE_NBYTES = _HEAD_NBYTES - 8

_ANEW = "Start all ranks anew from the latest checkpoint"

Message = tuple[int, torch.Tensor]
"""Rank, as an index into `Transport.ranks`, and a contiguous tensor that is sent there or filled from there."""


@dataclass
class Transport:
    """Connection of the ranks that share a model, with the state that they have agreed on.

    Args:
        ranks: of the default process group, in the order of the mesh; this process's is among them.
        timeout_s: how long a rank waits for another before it fails.
        num_copies: of every shard (see `chunkc.ir.shards`).

    Attributes:
        num_hosts: hosts that the ranks run on, by their names.
        sent_nbytes: bytes that this rank has sent, by channel.
        failure: why ranks can no longer exchange; None: nothing has failed. A checkpoint that is being written goes on
            then, and one that fails does not stop training: that channel fails by itself.
        accumulating: more gradients will be added to those of the backwards that run now: in stage 1 of ZeRO each rank
            keeps its own until then.
        num_renewed: how often ranks have dropped their plans of a step; the same on all of them.
        steps: a hash of the steps of optimizers so far.
        device: this rank's compute device (see `connect_gpus`).

    Raises:
        DistributedError: another rank does not come.
    """

    ranks: tuple[int, ...]
    timeout_s: float
    num_copies: int = 1
    num_hosts: int = 1
    sent_nbytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_CHANNELS, 0))
    failure: BaseException | None = None
    accumulating: bool = False
    num_renewed: int = 0
    steps: str = ""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        timeout = timedelta(seconds=self.timeout_s)
        self.rank = self.ranks.index(dist.get_rank())
        ranks = list(self.ranks)
        try:
            self._groups = {
                channel: dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
                for channel in self.sent_nbytes
            }
        except RuntimeError as error:
            raise self._lost("addresses", "another rank") from error
        self._world: Transport | None = None
        self._layers: tuple[dist.ProcessGroup, ...] = ()
        self._failed_checkpoint: BaseException | None = None
        self._gpus: GpuMessages | None = None
        self._linked_gpus: GpuMessages | None = None  # of the transport that fails with this one

    def connect_gpus(self, device: torch.device) -> None:
        """Connect the GPUs of all ranks, this rank's being `device`: tensors there are exchanged by NCCL.

        Raises:
            DistributedError: NCCL cannot connect them.
        """
        lost = self._lost("shards between GPUs", "another rank")
        reference = weakref.ref(self)

        def on_timeout() -> None:
            if (transport := reference()) is not None and transport.failure is None:
                transport.failure = lost

        try:
            self._gpus = GpuMessages(self.ranks, device, self.timeout_s, on_timeout, self._layers)
        except RuntimeError as error:
            raise DistributedError(f"rank {self.rank} of {self.num_ranks} has no NCCL: {error}. {_ANEW}") from error
        self.device = device
        self.world._linked_gpus = self._gpus

    @property
    def world(self) -> Transport:
        """Transport of all ranks that train the model: with tensor parallelism more than `ranks`."""
        return self if self._world is None else self._world

    def join_layers(self, world: Transport, layers: Sequence[dist.ProcessGroup]) -> None:
        """Note the groups of tensor parallelism, and the transport of all ranks."""
        self._world, self._layers = world, tuple(layers)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def others(self) -> tuple[int, ...]:
        """Other ranks, beginning with the next: ranks do not all send to the same one at first."""
        return tuple((self.rank + step) % self.num_ranks for step in range(1, self.num_ranks))

    def exchange(self, channel: str, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0) -> None:
        """Send and receive, and wait until all messages are over. Empty tensors are no messages.

        Tensors on a GPU are exchanged in the order of the current stream, whatever the channel and the tag are. Then
        the call does not wait, and a missing rank is detected later (see `failure`).

        Args:
            tag: exchanges of one tag match, in their order.

        Raises:
            DistributedError: another rank is gone, or has not come within the timeout.
        """
        self.check(channel)
        group, works, peer = self._groups[channel], [], self.rank
        receives = [(rank, _bytes(tensor)) for rank, tensor in receives if tensor.numel()]
        sends = [(rank, _bytes(tensor)) for rank, tensor in sends if tensor.numel()]
        try:
            if any(tensor.is_cuda for _, tensor in (*receives, *sends)):
                assert self._gpus is not None
                self._gpus.exchange(sends, receives)
                self.sent_nbytes[channel] += sum(tensor.nbytes for _, tensor in sends)
                return
            for peer, tensor in receives:
                works.append((peer, dist.irecv(tensor, src=self.ranks[peer], group=group, tag=tag)))
            for peer, tensor in sends:
                works.append((peer, dist.isend(tensor, dst=self.ranks[peer], group=group, tag=tag)))
                self.sent_nbytes[channel] += tensor.nbytes
            for peer, work in works:  # noqa: B007
                assert work is not None
                work.wait()
        except RuntimeError as error:
            lost = self._lost(channel, f"rank {peer}")
            if channel == CHECKPOINTS:
                self._failed_checkpoint = lost
            else:
                self._fail(lost)
            raise copy(lost) from error

    def all_gather(self, value: Any, channel: str = AGREEMENTS) -> list[Any]:
        """Gather every rank's value, in the order of the ranks; all ranks call this collectively.

        Takes no memory of torch's allocator.

        Raises:
            DistributedError: as `exchange`.
        """
        own = pickle.dumps(value)
        heads = [bytearray(_HEAD_NBYTES) for _ in self.ranks]
        heads[self.rank][:] = (len(own).to_bytes(8, "little") + own[:_INLINE_NBYTES]).ljust(_HEAD_NBYTES, b"\0")
        self._all_gather_bytes(heads, channel)
        lengths = [int.from_bytes(head[:8], "little") for head in heads]
        rests = [bytearray(max(0, length - _INLINE_NBYTES)) for length in lengths]
        rests[self.rank][:] = own[_INLINE_NBYTES:]
        self._all_gather_bytes(rests, channel)
        values = zip(heads, rests, lengths, strict=True)
        return [pickle.loads((head[8:] + rest)[:length]) for head, rest, length in values]

    def add_up(self, values: torch.Tensor, rendezvous: Sequence[int], tag: int) -> None:
        """Sum a tensor over the ranks of a rendezvous, this one among them, in place: the same bits on each.

        Blocks the host. Takes no memory of torch's allocator.

        Raises:
            DistributedError: as `exchange`.
        """
        others = [rank for rank in self.others if rank in rendezvous]
        total, *rooms = (
            torch.frombuffer(bytearray(values.nbytes), dtype=values.dtype).view(values.shape)
            for _ in range(len(rendezvous) + 1)
        )
        terms = dict(zip(rendezvous, rooms, strict=True))
        terms[self.rank].copy_(values)
        sends = [(rank, terms[self.rank]) for rank in others]
        self.exchange(SUMS, sends, [(rank, terms[rank]) for rank in others], tag)
        for rank in rendezvous:
            total.add_(terms[rank])
        values.copy_(total)

    def _all_gather_bytes(self, buffers: Sequence[bytearray], channel: str) -> None:
        """Send this rank's buffer, and fill the others'; all ranks know which buffers are empty."""
        tensors = {n: torch.frombuffer(b, dtype=torch.uint8) for n, b in enumerate(buffers) if b}
        sends = [(rank, tensors[self.rank]) for rank in self.others if self.rank in tensors]
        self.exchange(channel, sends, [(rank, tensors[rank]) for rank in self.others if rank in tensors])

    def check(self, channel: str = AGREEMENTS) -> None:
        """Raise DistributedError if ranks can no longer exchange on a channel."""
        failure = self._failed_checkpoint if channel == CHECKPOINTS else self.failure
        if isinstance(failure, DistributedError):
            raise copy(failure) from failure.__cause__
        if failure is not None:
            raise DistributedError(
                f"rank {self.rank} of {self.num_ranks} cannot go on after {type(failure).__name__}: {failure}. {_ANEW}"
            ) from failure

    def give_up(self, cause: BaseException) -> None:
        """Fail because this rank stops in the middle of a plan: the others must not wait for it.

        Closes the connections, which ends the others' waits, in tensor-parallel layers too. The channel of checkpoints
        stays open: the checkpoint being written is of an earlier step.
        """
        if self.failure is None:
            self._fail(cause)
            for channel, group in self._groups.items():
                if channel != CHECKPOINTS:
                    _close(group)
        if self._world is not None:
            self._world.give_up(cause)
        layers, self._layers = self._layers, ()
        for group in layers:
            _close(group)

    def _fail(self, cause: BaseException) -> None:
        """Stop all exchanges; those under way between GPUs are aborted, so that no rank waits for them."""
        self.failure = self.failure or cause
        for gpus in (self._gpus, self._linked_gpus):
            if gpus is not None:
                gpus.abort()

    def _lost(self, channel: str, peer: str) -> DistributedError:
        return DistributedError(
            f"rank {self.rank} of {self.num_ranks} cannot go on: in an exchange of {channel} {peer} was gone, or did "
            f"not come within {self.timeout_s:g} s. The first error of any rank is the cause. {_ANEW}"
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes: gloo does not support all dtypes."""
    return tensor.view(-1).view(torch.uint8)


def _close(group: dist.ProcessGroup) -> None:
    """Close this rank's connections in a group: gloo does so when a message does not come in time."""
    for rank in dist.get_process_group_ranks(group):
        if rank != dist.get_rank():
            with suppress(RuntimeError):
                work = dist.irecv(torch.empty(1, dtype=torch.uint8), src=rank, group=group, tag=1)
                assert work is not None
                work.wait(timedelta(milliseconds=1))
