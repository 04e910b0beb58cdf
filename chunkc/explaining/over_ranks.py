"""A model that is cut over ranks, as one of them trains it: what `chunkc.distribute` makes of it, without any rank.

The rank is number 0, whose parts are the largest. Where its copies and exchanges stand is the planner's to say, as on
ranks that run: the layout tells it that groups are cut, and the hardware over how many devices.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from chunkc.explaining.offline import OfflineGraph, OfflineStep
from chunkc.explaining.optimizer_choice import Optimizer
from chunkc.ir.chunks import CASTS, PARAM, Chunk, ChunkLayout, ParamSpec
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.ir.explanation import GatheredGroup, Ranks, TimedEvent
from chunkc.ir.hardware import Hardware
from chunkc.ir.links import GATHER, SCATTER
from chunkc.ir.shards import Shards, ZeroStage, check_zero_stage
from chunkc.ir.simulate import link_nbytes
from chunkc.ir.text import short
from chunkc.optim.over_ranks import refuse_over_ranks
from chunkc.options import Options
from chunkc.ranks import refuse_moved_activations

_MESH = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")


def refuse_distributed(model: nn.Module) -> None:
    """Refuse a model that `chunkc.distribute` has cut.

    Raises:
        UnsupportedError: it has.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"{name} is distributed already: explain the model as it is before chunkc.distribute and "
                "parallelize_module, with world_size"
            )


def with_ranks(hardware: Hardware, world_size: int | None, mesh: str | None) -> Hardware:
    """The hardware as far as the ranks use it that train one model together.

    Args:
        world_size: how many there are; None: one on each device.
        mesh: hosts, and ranks on each: `2x8`. Parameters are cut over the ranks of a host, and hosts have copies, as on
            a mesh of two dimensions. None: they are cut over all ranks, which lie on no more hosts than they need.

    Raises:
        OptionsError: the hardware has no such devices, or the two say different things.
    """
    if mesh is None:
        return hardware if world_size is None else hardware.used_by(world_size)
    found = _MESH.fullmatch(mesh.strip().lower())
    if found is None:
        raise OptionsError(f"mesh is {short(mesh)}; allowed: hosts and ranks on each, such as 2x8")
    num_hosts, each = map(int, found.groups())
    if world_size is not None and world_size != num_hosts * each:
        raise OptionsError(f"world_size is {world_size}, but mesh {short(mesh)} has {num_hosts * each} ranks")
    return hardware.used_by(num_hosts * each, num_hosts, num_hosts)


def cut_over(step: OfflineStep, hardware: Hardware, zero_stage: ZeroStage | None, options: Options) -> OfflineStep:
    """The step with rank 0's parts in place of all parameters; one rank has all of them.

    Raises:
        OptionsError: there is no such stage.
        UnsupportedError: ranks that run would refuse the model or an option.
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
    return replace(graph, movable=tuple(_part(spec, hardware, zero_stage) for spec in graph.movable))


def _part(spec: ParamSpec, hardware: Hardware, zero_stage: ZeroStage | None) -> ParamSpec:
    if not spec.shape:
        return spec.part(Shards((), 1, 0, zero_stage, hardware.num_devices))
    if not torch.empty_strided(spec.shape, spec.stride, device="meta").is_contiguous():
        raise UnsupportedError(f"{spec.name} is not contiguous: ranks cut contiguous parameters by rows")
    return spec.part(Shards(spec.shape, hardware.devices_per_row, 0, zero_stage, hardware.num_copies))


def refuse_optimizer(optimizer: Optimizer, specs: Collection[ParamSpec], num_ranks: int) -> None:
    """Refuse an optimizer whose states cannot be cut over ranks.

    Raises:
        UnsupportedError: they cannot.
    """
    if num_ranks > 1:
        for moments in sorted({str(spec.states.moments) for spec in specs if spec.trainable}):
            refuse_over_ranks(optimizer.name, moments)


def ranks_of(layout: ChunkLayout, events: Sequence[TimedEvent], hardware: Hardware) -> Ranks | None:
    """What rank 0 does in a step; None where the model is not cut."""
    if not layout.cut:
        return None
    streams = [event.stream for event in events]
    return Ranks(
        num_ranks=hardware.num_devices,
        num_hosts=hardware.num_hosts,
        zero_stage=next(spec.shards.zero_stage for spec in layout.specs().values() if spec.shards is not None),
        ranks_per_host=hardware.devices_per_host,
        num_parameters=sum(spec.numel for spec in layout.specs().values()),
        gathers=streams.count(GATHER),
        scatters=streams.count(SCATTER),
        link_nbytes=link_nbytes(events, hardware),
        groups=tuple(_gathered(layout, events)),
    )


def _gathered(layout: ChunkLayout, events: Sequence[TimedEvent]) -> Iterator[GatheredGroup]:
    seconds_of: dict[str, list[float]] = {}
    for event in events:
        if event.stream == GATHER:
            seconds_of.setdefault(event.name, []).append(event.end_s - event.start_s)
    for group in layout.groups:
        names = [str(Chunk(kind, group.index)) for kind in (PARAM, *CASTS)]
        seconds = [second for name in names for second in seconds_of.get(name, ())]
        nbytes, is_whole = group.gathered_numel * group.dtype.itemsize, PARAM in group.standing_kinds
        yield GatheredGroup(names[0], group.title, nbytes, is_whole, len(seconds), sum(seconds))


def notes(ranks: Ranks | None, hardware: Hardware) -> Iterator[str]:
    """What was assumed of the ranks."""
    if ranks is None:
        return
    where = f"{ranks.num_ranks} ranks on {ranks.num_hosts} host{'s' if ranks.num_hosts > 1 else ''}"
    yield f"all bytes, times and the batch are those of rank 0 of {where}; its parts are the largest"
    if hardware.num_copies > 1:
        yield "parameters are cut over the ranks of a host, and hosts have copies of each other's parts"
    yield "ranks exchange in rings, or in trees where these are faster, at the rate of the slowest link between them"
    if hardware.kind == "cuda":
        yield "chunkc.distribute has run on GPUs made of RAM, and was never timed on real ones"
