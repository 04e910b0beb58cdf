"""Compute the norm of all gradients of an optimizer, from sums that were taken while each gradient was in its slot.

Gradients without a valid sum are read in place: those that never move, and those at home that were changed, or may have
been. Both are added up in rows (see `chunkc.ir.sums`), so the norm has the same bits under every budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch

from chunkc.distributed.agreement import together
from chunkc.ir.errors import DistributedError
from chunkc.ir.strides import is_dense
from chunkc.ir.sums import SumSquares, num_rows, rows_of
from chunkc.kernels import row_sums_cpu, row_sums_triton
from chunkc.kernels.host_memory import host_empty
from chunkc.optim.on_device import computes_by_triton, upload
from chunkc.optim.states import flat, real_parts
from chunkc.runtime.store.shards import LocalShard
from chunkc.session.session import managing, owner

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Parameters with their gradients, in an optimizer's order."""


def summing_on(device: torch.device) -> SumSquares:
    """Return the kernel that adds up squares on a device."""
    return row_sums_triton.sum_squares if computes_by_triton(device) else row_sums_cpu.sum_squares


@torch.no_grad()
def sum_of_squares(pairs: Pairs, since: int) -> torch.Tensor:
    """Add up the squares of all elements: 0-dim fp64, finite if and only if every element is. Waits for no device.

    The result is on a device if a gradient is on one. Each rank calls this: of parameters that are cut over ranks, all
    ranks' shards count. Of copies of a shard the first counts, and likewise of parameters that the ranks of tensor
    parallelism have alike.

    Args:
        since: sums that are older are invalid (see `chunkc.runtime.store.gradient_sums.clock`).
    """
    counted = [(p, g) for p, g in pairs if not isinstance(p, LocalShard) or (p.shards.copy == 0 and p.is_first)]
    owners = (owner(parameter) for parameter, _ in pairs)
    session = next((owned[0] for owned in owners if owned is not None), None)
    sums: list[torch.Tensor] = []

    def compute() -> None:
        sums.append(_local_sum(counted, since))

    if session is None:
        compute()
    else:
        session.store.tier.enqueue(compute)
        session.store.tier.materialise()
    return _over_ranks(sums[0], [parameter for parameter, _ in pairs])


def _local_sum(pairs: Pairs, since: int) -> torch.Tensor:
    """Add up this rank's squares."""
    rows: list[torch.Tensor | None] = []
    unread: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, (parameter, gradient) in enumerate(pairs):
        taken = None
        if (home := managing(parameter)) is not None:
            session, name = home
            taken = session.store.sums.of(name, gradient, since=since)
            if taken is None:
                session.store.sums.read_nbytes += gradient.nbytes
        rows.append(taken)
        if taken is None and gradient.numel():
            unread.setdefault((gradient.device, gradient.dtype), []).append(index)
    for (device, _), indices in unread.items():
        read = _read([pairs[index][1] for index in indices], device)
        for index, of_gradient in zip(indices, read, strict=True):
            rows[index] = of_gradient
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for sums in rows:
        if sums is not None:
            by_device.setdefault(sums.device, []).append(sums)
    if not by_device:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    where = next((device for device in by_device if device.type != "cpu"), next(iter(by_device)))
    total, *others = [_total(sums, device).to(where) for device, sums in by_device.items()]
    return sum(others, total)


def _read(gradients: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Read gradients of one dtype, and return the sums of each, `[num_rows]`."""
    resolved = [g.resolve_conj() for g in gradients]
    dense = [real_parts(flat(g if is_dense(g) else g.contiguous())) for g in resolved]
    base, itemsize = dense[0].data_ptr(), dense[0].dtype.itemsize
    table = torch.from_numpy(rows_of([((g.data_ptr() - base) // itemsize, g.numel()) for g in dense]))
    shape, dtype = (len(table),), torch.float64
    sums = host_empty(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)
    summing_on(device)(dense[0], upload(table, device), sums)
    return list(sums.split([num_rows(g.numel()) for g in dense]))


def _total(sums: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Add up all sums, in one order: on the CPU by one thread, and without torch's memory."""
    if device.type == "cpu":
        total = np.add.reduce(np.concatenate([part.numpy() for part in sums]))
        return torch.from_numpy(np.array(total))
    return torch.cat(list(sums)).sum()


def _over_ranks(own: torch.Tensor, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Add up all ranks' sums, in the order of ranks, on the device of this rank's own."""
    part = next((p for p in parameters if isinstance(p, LocalShard)), None)
    if part is None:
        return own
    of_ranks = together(part.world, "the norm of all gradients", partial(float, own), DistributedError)
    return torch.from_numpy(np.array(np.add.reduce(of_ranks))).to(own.device)
