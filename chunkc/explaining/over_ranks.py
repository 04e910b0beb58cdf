"""Cut a captured step over ranks as `chunkc.distribute` does, without any rank.

The result is the step of rank 0, which has the largest shards. The planner places its copies and exchanges as on real
ranks: the layout says that groups are cut, and the hardware over how many devices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx, nn

from chunkc.distributed.agreement import refuse_moved_activations
from chunkc.distributed.tensor_parallel import mesh_of_layers
from chunkc.explaining.offline import OfflineGraph, OfflineStep
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.explanation import GatheredGroup, Layers, Ranks, TimedEvent
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import CASTS, PARAM, Chunk, ChunkLayout, ParamSpec
from chunkc.ir.links import BETWEEN_DEVICES, GATHER, LINKS, SCATTER
from chunkc.ir.shards import Shards, ZeroStage, check_zero_stage
from chunkc.ir.simulate import link_nbytes
from chunkc.ir.text import short
from chunkc.options import Options
from chunkc.passes.graphs.collectives import exchange_of
from chunkc.runtime.store.shards import LocalShard, local_shard_of
from chunkc.torch_private.dynamo import unwrapped

_MESH = re.compile(r"([0-9]{1,6})x([0-9]{1,6})(?:x([0-9]{1,6}))?")


def refuse_distributed(model: nn.Module) -> None:
    """Refuse a model that `chunkc.distribute` has cut.

    Raises:
        UnsupportedError: it is cut.
    """
    for name, parameter in model.named_parameters():
        if isinstance(local_shard_of(parameter), LocalShard):
            raise UnsupportedError(
                f"{name} is distributed already: explain the model as it is before chunkc.distribute, with world_size "
                "or mesh"
            )


def check_layers(model: nn.Module, hardware: Hardware) -> None:
    """Check that a model's layers are cut over as many ranks as the hardware says.

    Raises:
        OptionsError: they are not.
        UnsupportedError: real ranks would refuse how `parallelize_module` has cut the model.
    """
    cut, wanted = mesh_of_layers(unwrapped(model)), hardware.devices_per_layer
    if cut is None and wanted > 1:
        raise OptionsError(
            f"mesh says that {wanted} devices compute each layer together, but parallelize_module has cut none: let it "
            f"cut the model over a mesh of {wanted} ranks first. A factory in a file may have the parameter mesh, and "
            'takes mesh["tp"] of it'
        )
    if cut is not None and cut[1].size() != wanted:
        name, size = cut[0], cut[1].size()
        raise OptionsError(
            f"parallelize_module has cut {name} over {size} ranks: say so in the last of three numbers of mesh, such "
            f'as "1x2x{size}" for two rows of them'
        )


def with_ranks(hardware: Hardware, world_size: int | None, mesh: str | None) -> Hardware:
    """Return the part of the hardware that the ranks of one training use.

    Args:
        world_size: number of ranks; None: one on each device.
        mesh: hosts, and ranks on each: `2x8`. Parameters are cut over the ranks of a host, and hosts have copies, as on
            a mesh of two dimensions. None: they are cut over all ranks, on no more hosts than needed. With a third
            number, `2x4x2`, as many neighbours compute each layer together (tensor parallelism), and the shard of each
            of them is cut over as many ranks as the second number says. `1x4x2` has no copies, and needs as many hosts
            as have eight devices.

    Raises:
        OptionsError: the hardware has no such devices, or `world_size` and `mesh` disagree.
    """
    if mesh is None:
        return hardware if world_size is None else hardware.used_by(world_size)
    match = _MESH.fullmatch(mesh.strip().lower())
    if match is None:
        raise OptionsError(
            f"mesh is {short(mesh)}; allowed: hosts and ranks on each, such as 2x8; with tensor parallelism a third "
            "number, of devices that compute each layer together, such as 2x4x2"
        )
    num_copies, num_shards, per_layer = (int(number or 1) for number in match.groups())
    num_ranks = num_copies * num_shards * per_layer
    if world_size is not None and world_size != num_ranks:
        raise OptionsError(f"world_size is {world_size}, but mesh {short(mesh)} has {num_ranks} ranks")
    on_any_hosts = match[3] is not None and num_copies == 1
    return hardware.used_by(num_ranks, None if on_any_hosts else num_copies, num_copies, per_layer)


def cut_over(step: OfflineStep, hardware: Hardware, zero_stage: ZeroStage | None, options: Options) -> OfflineStep:
    """Return the step with rank 0's shards in place of the parameters; unchanged for a single rank.

    Raises:
        OptionsError: there is no such stage.
        UnsupportedError: real ranks would refuse the model or an option.
    """
    check_zero_stage(zero_stage)
    if hardware.num_devices == 1:
        return step
    refuse_moved_activations(options)
    return replace(step, graphs=tuple(_cut(graph, hardware, zero_stage) for graph in step.graphs))


def _cut(graph: OfflineGraph, hardware: Hardware, zero_stage: ZeroStage | None) -> OfflineGraph:
    for spec in graph.fixed:
        raise UnsupportedError(
            f"{spec.name} shares its memory with other tensors, or is no dense tensor of real numbers: ranks cannot "
            "have parts of it"
        )
    return replace(graph, movable=tuple(_shard(spec, hardware, zero_stage) for spec in graph.movable))


def _shard(spec: ParamSpec, hardware: Hardware, zero_stage: ZeroStage | None) -> ParamSpec:
    if not spec.shape:
        return spec.part(Shards((), 1, 0, zero_stage, hardware.devices_per_row * hardware.num_copies))
    if not torch.empty_strided(spec.shape, spec.stride, device="meta").is_contiguous():
        raise UnsupportedError(f"{spec.name} is not contiguous: ranks cut contiguous parameters by rows")
    return spec.part(Shards(spec.shape, hardware.devices_per_row, 0, zero_stage, hardware.num_copies))


def layers_of(graphs: Iterable[fx.GraphModule], hardware: Hardware) -> Layers | None:
    """Count rank 0's exchanges within layers while it runs these graphs; None if layers are not cut.

    `graphs`: of each forward and backward of a step.
    """
    if hardware.devices_per_layer == 1:
        return None
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    exchanges = [exchange for node in nodes if (exchange := exchange_of(node, hardware)) is not None]
    return Layers(
        num_ranks=hardware.devices_per_layer,
        collectives=len(exchanges),
        nbytes=sum(exchange.sent_nbytes(hardware.devices_per_layer) for exchange in exchanges),
        seconds=sum(exchange.seconds(hardware) for exchange in exchanges),
    )


def ranks_of(
    layout: ChunkLayout, events: Sequence[TimedEvent], hardware: Hardware, layers: Layers | None
) -> Ranks | None:
    """Count rank 0's exchanges in a step; None if the model is not cut."""
    if not layout.cut:
        return None
    carried = Counter(link_nbytes(events, hardware))
    carried.update(hardware.carried_in_layers(0 if layers is None else layers.nbytes))
    streams = [event.stream for event in events]
    return Ranks(
        num_ranks=hardware.num_devices,
        num_hosts=hardware.num_hosts,
        zero_stage=next(spec.shards.zero_stage for spec in layout.specs().values() if spec.shards is not None),
        ranks_per_host=hardware.devices_per_host,
        num_parameters=sum(spec.numel for spec in layout.specs().values()),
        gathers=streams.count(GATHER),
        scatters=streams.count(SCATTER),
        link_nbytes={name: carried[name] for name in LINKS if carried[name]},
        groups=tuple(_gathered(layout, events)),
        layers=layers,
    )


def _gathered(layout: ChunkLayout, events: Sequence[TimedEvent]) -> Iterator[GatheredGroup]:
    seconds_of: dict[str, list[float]] = {}
    for event in events:
        if event.stream == GATHER:
            seconds_of.setdefault(event.name, []).append(event.end_s - event.start_s)
    for group in layout.groups:
        names = [str(Chunk(kind, group.index)) for kind in (PARAM, *CASTS)]
        seconds = [second for name in names for second in seconds_of.get(name, ())]
        nbytes, is_whole = group.gathered_numel * group.dtype.itemsize, PARAM in group.replicated_kinds
        yield GatheredGroup(names[0], group.title, nbytes, is_whole, len(seconds), sum(seconds))


def notes(ranks: Ranks | None, hardware: Hardware) -> Iterator[str]:
    """Yield the assumptions about the ranks."""
    if ranks is None:
        return
    where = f"{ranks.num_ranks} ranks on {ranks.num_hosts} host{'s' if ranks.num_hosts > 1 else ''}"
    yield f"all bytes, times and the batch are those of rank 0 of {where}; its parts are the largest"
    if hardware.num_copies > 1:
        yield "parameters are cut over the ranks of a host, and hosts have copies of each other's parts"
    if (layers := ranks.layers) is not None:
        yield (
            f"{layers.num_ranks} ranks compute each layer together, and have the same batch: each has a part of its "
            "parameters, and what is cut over the others is that part"
        )
    yield "ranks exchange in rings, or in trees where these are faster, at the rate of the slowest link between them"
    if hardware.devices_per_host > 1 and hardware.link(BETWEEN_DEVICES) is None:
        yield "no link between devices of a host is stated: they exchange through its RAM, as without peer access"
    if hardware.kind == "cuda":
        yield "chunkc.distribute has run on GPUs made of RAM, and was never timed on real ones"
