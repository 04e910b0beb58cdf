"""Cut a model's parameters over ranks (ZeRO), as PyTorch's `DTensor`s: `chunkc.distribute`.

On GPUs, each rank's parts are in pinned memory from then on, as by `chunkc.place`: Dynamo has to find them on the
device.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from chunkc.distributed.agreement import agree, together
from chunkc.distributed.process_group import TIMEOUT_S, check_timeout, is_timeout
from chunkc.distributed.tensor_parallel import TensorParallel, is_parallel, local, tensor_parallel
from chunkc.distributed.whole_parameters import let_read, whole
from chunkc.ir.errors import ChunkcError, DistributedError, OptionsError, UnsupportedError
from chunkc.ir.shards import ZeroStage, check_zero_stage
from chunkc.machines.devices import parse_device
from chunkc.options import parse_options
from chunkc.runtime.distributed.transport import Transport
from chunkc.runtime.storage.unassigned import (
    SMALLEST_NBYTES,
    UnassignedMemory,
    note_unassigned_memory,
    unassigned_memory_at,
)
from chunkc.runtime.store.shards import LocalShard, local_shard_of, shards_on
from chunkc.session.movable import can_move, is_chunkable
from chunkc.session.place import move_residents, place_parts
from chunkc.session.session import owner

_MESH = 'mesh must be a DeviceMesh of one or two dimensions on "cpu" or "cuda", as init_device_mesh makes it'


@torch.no_grad()
def distribute(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    home: str = "cpu",
    disk_holds: str = "auto",
    zero_stage: ZeroStage | None = None,
    timeout_s: float = TIMEOUT_S,
) -> nn.Module:
    """Cut a model's parameters over the ranks of a mesh, in place; compile it afterwards.

        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        model = chunkc.distribute(model, mesh)
        model = torch.compile(model, backend="chunkc", options={"memory_budget": "6GiB"})
        optimizer = chunkc.optim.AdamW(model.parameters(), lr=3e-4)

    Every rank calls this with the same model, made with the same seed, and keeps its part: rows of the first dimension,
    as `torch.distributed.tensor.Shard(0)` cuts them. Every parameter becomes a `DTensor`, and so will its gradient. The
    compiled model computes with whole parameters: a plan gathers chunks, and brings each rank's part of the mean of all
    ranks' gradients home. Buffers stay as they are on each rank.

    Args:
        model: on the CPU, with all its parameters, and not compiled yet. Or on the meta device: then each rank makes
            room for its own parts, all zeros, and no whole parameter is ever there; `chunkc.load` brings the values.
            Of one that `parallelize_module` has cut over another dimension of the same mesh, each rank's local tensors
            are cut as whole parameters are.
        mesh: on "cpu" or "cuda"; the ranks that train the model. On "cuda", each computes on its current CUDA device,
            which is its alone, and parts travel by NCCL. On one of two dimensions parameters are cut over the inner
            one, such as the ranks of a host, and ranks along the outer one have copies of each other's parts. Gradients
            are the mean over all.
        home: where each rank's parts are between calls: "cpu", which is RAM, "disk" or "disk:DIR". Each rank has a file
            of its own there, without a name. `torch.compile` takes the home over. On "cuda" RAM is pinned.
        disk_holds: what a disk holds: optimizer `"states"`, parameters and gradients being in RAM; `"everything"`, for
            which a GPU has to read files in place; or `"auto"`: everything on "cpu", states on "cuda".
        zero_stage: None lets the plan choose for each group of parameters: as in stage 2 where the budget has the room,
            else as in stage 3. 3 gathers parameters where a forward or backward needs them. 2 gathers them once after
            each change and keeps them whole on the compute tier: a third less is sent. 1 keeps whole gradients, too; so
            backwards inside `optimizer.accumulating()` exchange nothing.
        timeout_s: seconds that a rank waits for another before it raises an error.

    Returns:
        The model.

    Raises:
        OptionsError: an argument has a wrong type or value, or ranks have one GPU in common.
        UnsupportedError: a parameter cannot be cut, or there is no GPU; nothing has changed.
        HomeError: the home has no room on this rank, or cannot be used; nothing has changed.
        DistributedError: the ranks' models differ, or a rank does not come, or has raised one of the other errors;
            nothing has changed.
    """
    check = partial(_check, model, mesh, home, disk_holds, zero_stage, timeout_s)
    transport = _transport_on(mesh, timeout_s, check)
    parallel = _layers_of(model, mesh)
    if parallel is not None:
        transport.join_layers(_transport_on(parallel.joint, timeout_s, check), parallel.mesh.get_all_groups())
    world = transport.world
    together(world, "chunkc.distribute()", check, DistributedError)
    named = dict(model.named_parameters())
    shapes = [(name, tuple(local(p).shape), p.dtype) for name, p in named.items()]
    options = parse_options({"home": home, "disk_holds": disk_holds}).over_ranks
    device = _connected(transport, world) if mesh.device_type == "cuda" else torch.device("cpu")
    at_home = f"{options.home_kind}, which holds {options.on_disk(device.type)}"
    in_common = {"zero_stage": str(zero_stage), "the kind of home": at_home}
    if parallel is not None:
        both = {"the mesh of both": str(parallel.joint.mesh.tolist())}
        agree(world, {"the parameters of the model": repr(list(named)), **both, **in_common})
    agree(transport, {"the parameters of the model": repr(shapes), "the mesh": str(mesh.mesh.tolist()), **in_common})
    made: dict[int, nn.Parameter] = {}

    def cut_all() -> str:
        on_disk = options.on_disk(device.type)
        at_once = on_disk != "nothing" if device.type == "cpu" else on_disk == "everything"  # else they are in RAM
        unassigned_memory = (
            unassigned_memory_at(home, disk_holds, disk_holds_parameters=on_disk == "everything") if at_once else None
        )
        for parameter in named.values():
            made[id(parameter)] = _cut(parameter, mesh, parallel, transport, zero_stage, unassigned_memory, device)
        if device.type == "cuda":
            place_parts(model, {name: local_shard_of(made[id(p)]) for name, p in named.items()}, transport, options)
        return socket.gethostname()

    hosts = dict(zip(world.ranks, together(world, "chunkc.distribute()", cut_all, DistributedError), strict=True))
    transport.num_hosts = len({hosts[rank] for rank in transport.ranks})
    world.num_hosts = len(set(hosts.values()))
    for module in model.modules():
        if module._parameters:
            _distribute_module(module, made, parallel)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    move_residents(model, (), device)
    return model


def _layers_of(model: nn.Module, mesh: DeviceMesh) -> TensorParallel | None:
    """Find how `parallelize_module` has cut the model; None also where that does not go with the mesh.

    The mismatch is refused later, once all ranks can hear of it."""
    try:
        return tensor_parallel(model, mesh)
    except (ChunkcError, AttributeError):
        return None


def _connected(transport: Transport, world: Transport) -> torch.device:
    """Connect this rank's GPU with those of the ranks that it exchanges parts with, and return it.

    Raises:
        OptionsError: two ranks have the same GPU.
        DistributedError: NCCL cannot connect them.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack its number
    own = socket.gethostname(), str(properties.uuid)
    machines = together(world, "chunkc.distribute()", lambda: own, DistributedError)
    transport.num_hosts = len({machines[world.ranks.index(rank)][0] for rank in transport.ranks})
    for rank, found in enumerate(machines):
        first = machines.index(found)
        if first != rank:
            raise OptionsError(
                f"ranks {first} and {rank} compute on one GPU of {found[0]}, and each needs a GPU of its own: call "
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) first, and start as many ranks as there are GPUs'
            )
    transport.connect_gpus(device)
    return device


def _transport_on(mesh: DeviceMesh, timeout_s: float, check: Callable[[], None]) -> Transport:
    """Connect a mesh's ranks, also if one of them has a wrong argument: once connected, all can raise its error.

    Raises:
        OptionsError: this process belongs to no mesh.
        DistributedError: a rank does not come. Whatever `check` raises here comes first.
    """
    is_mesh = isinstance(mesh, DeviceMesh)
    if not dist.is_initialized() or (is_mesh and mesh.get_coordinate() is None):
        raise OptionsError(f"{_MESH}; this process is in none")
    ranks = mesh.mesh.flatten().tolist() if is_mesh else range(dist.get_world_size())
    num_copies = mesh.size(0) if is_mesh and mesh.ndim > 1 else 1
    try:
        return Transport(tuple(ranks), timeout_s if is_timeout(timeout_s) else TIMEOUT_S, num_copies)
    except DistributedError:
        check()
        raise


def _check(
    model: nn.Module, mesh: DeviceMesh, home: str, disk_holds: str, zero_stage: ZeroStage | None, timeout_s: float
) -> None:
    """Refuse arguments and models that this rank cannot distribute."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim > 2 or mesh.device_type not in ("cpu", "cuda"):
        raise OptionsError(_MESH)
    if mesh.device_type == "cuda":
        parse_device("cuda")
    parse_options({"home": home, "disk_holds": disk_holds})
    check_zero_stage(zero_stage)
    check_timeout(timeout_s)
    named = dict(model.named_parameters())
    if not named:
        raise OptionsError("the model has no parameters to distribute: compile it as it is")
    for name, parameter in named.items():
        _check_parameter(name, parameter)
    tensor_parallel(model, mesh)
    without_values = {name for name, buffer in model.named_buffers() if buffer.is_meta}
    if unsaved := sorted(without_values.difference(model.state_dict()) if without_values else ()):
        raise UnsupportedError(
            f"the buffer {unsaved[0]} is on the meta device, and no file of weights has it: give it its values on "
            "the CPU before chunkc.distribute"
        )


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(local_shard_of(parameter), LocalShard) or owner(parameter) is not None:
        raise UnsupportedError(f"{name} is distributed or compiled already: distribute a model once, before it is")
    if parameter.device.type not in ("cpu", "meta") and not is_parallel(parameter):
        raise UnsupportedError(f"{name} is on {parameter.device}: build the model on the CPU, on every rank")
    own = local(parameter)
    fits = can_move(parameter) if own is parameter else is_chunkable(own)
    if not own.is_contiguous() or not (own.is_meta or fits):
        raise UnsupportedError(
            f"{name} shares its memory with other tensors, or is no contiguous tensor of real numbers: give it memory "
            "of its own (`p.data = p.data.clone(memory_format=torch.contiguous_format)`)"
        )


def _cut(
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    parallel: TensorParallel | None,
    transport: Transport,
    zero_stage: ZeroStage | None,
    unassigned_memory: UnassignedMemory | None,
    device: torch.device,
) -> nn.Parameter:
    here = local(parameter).detach()
    is_cut = here.dim() > 0
    shards = shards_on(mesh, tuple(here.shape), zero_stage, is_cut=is_cut)
    begin, end = shards.rows(shards.rank)
    rows = here[begin:end] if is_cut else here
    own = torch.zeros(rows.shape, dtype=rows.dtype) if rows.is_meta else rows
    if unassigned_memory is not None and own.nbytes >= SMALLEST_NBYTES:
        kept = unassigned_memory.copy_of(own)
    else:
        kept = own if rows.is_meta else own.to("cpu", copy=True)
    part = LocalShard.of(kept, shards, transport)
    if parallel is not None:
        part.is_first = parallel.is_first(parameter)
    if unassigned_memory is not None:
        note_unassigned_memory(part, unassigned_memory)
    copied: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    placements = [*copied, Shard(0) if is_cut else Replicate()]
    # On a GPU the part goes there later, and the parameter is there already. PyTorch asks it for the shape of a scalar.
    known = kept if device.type == "cpu" else torch.empty(0 if is_cut else (), dtype=kept.dtype, device=device)
    if parallel is not None:
        mesh, placements = parallel.joint, parallel.placements_of_parts(parameter, placements)
    placed = DTensor.from_local(
        known, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    distributed = nn.Parameter(placed, requires_grad=parameter.requires_grad)
    part.attach(distributed)  # type: ignore[arg-type]
    return distributed


def _distribute_module(module: nn.Module, made: dict[int, nn.Parameter], parallel: TensorParallel | None) -> None:
    """Give a module its parameters anew, and let it read them whole where it is compiled."""
    readers: dict[str, Callable[[Any], torch.Tensor]] = {}
    for name, former in list(module._parameters.items()):
        if former is not None:
            module._parameters[name] = made[id(former)]
            readers[name] = _while_compiling(whole if parallel is None else parallel.reader(former))
    let_read(module, readers)


def _while_compiling(compiled: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    return lambda parameter: compiled(parameter) if torch.compiler.is_compiling() else parameter
