"""Compile and place a model in place, for trainers of other libraries: its class and its names do not change."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from chunkc.distribute import distribute
from chunkc.distributed.process_group import TIMEOUT_S
from chunkc.ir.errors import OptionsError
from chunkc.ir.shards import ZeroStage
from chunkc.runtime.store.shards import LocalShard, local_shard_of
from chunkc.session.place import place
from chunkc.session.session import sessions_of
from chunkc.torch_private import dynamo


def compile_in_place(model: nn.Module, options: dict[str, Any]) -> None:
    """Compile a model by `model.compile(backend="chunkc", options=options)`, unless it is compiled in place already.

    Raises:
        OptionsError: the model is a return value of `torch.compile`.
    """
    if isinstance(model, dynamo.OptimizedModule):
        raise OptionsError(
            "the model is what torch.compile(model) returned, and files saved from it would have _orig_mod. before "
            'every name; give the model itself, or compile it in place: model.compile(backend="chunkc", options=...)'
        )
    if not dynamo.is_compiled_in_place(model):
        model.compile(backend="chunkc", options=options)


def was_called(model: nn.Module) -> bool:
    """Whether chunkc has compiled a graph with one of the model's parameters, so that it runs in the budget."""
    return any(session.num_graphs for session in sessions_of(model.parameters()))


def place_on(model: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
    """Move parameters from CPU memory to their homes without a copy on the device; call in place of `model.to(device)`.

    Does nothing if the device is the CPU, or chunkc has placed the model already.
    """
    if device.type != "cpu" and not sessions_of(model.parameters()):
        places = {key: options[key] for key in ("home", "disk_holds", "chunk_size", "debug") if key in options}
        place(model, device=device, **places)


def is_distributed(model: nn.Module) -> bool:
    """Whether `chunkc.distribute` has sharded a model."""
    return any(isinstance(local_shard_of(parameter), LocalShard) for parameter in model.parameters())


def distribute_over_all(
    model: nn.Module,
    device: torch.device,
    options: dict[str, Any],
    zero_stage: ZeroStage | None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Distribute a model over all processes with the values of rank 0, unless the user has distributed it.

    Values are broadcast, as other libraries do, because each rank may have initialised new layers at random.

    Args:
        device: device that this process computes on.
        timeout_s: seconds that a rank waits for another.
    """
    if is_distributed(model):
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    by_gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    values = [*model.parameters(), *model.buffers()]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [(tuple(value.shape), value.dtype) for value in values], group=by_gloo)
    if all(found == of_ranks[0] for found in of_ranks):  # else `distribute` raises an error with the difference
        with torch.no_grad():
            for value in values:  # gloo may keep a reference to its argument after the call: give it a copy
                received = value.detach().clone()
                dist.broadcast(received, src=0, group=by_gloo)
                value.data.copy_(received)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    at_home = {"home": options.get("home", "cpu"), "disk_holds": options.get("disk_holds", "auto")}
    distribute(model, mesh, **at_home, zero_stage=zero_stage, timeout_s=timeout_s)
    # Do not destroy `by_gloo`: PyTorch names a group by the number of groups, so the next name would be taken.
