"""Find the session of a graph that is being compiled, or open one."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from chunkc.distributed.agreement import refuse_moved_activations
from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.options import Options
from chunkc.runtime.distributed.transport import Transport
from chunkc.runtime.storage.unassigned import unassigned_memory_of, unassigned_memory_of_parameter
from chunkc.session.movable import present_nbytes
from chunkc.session.session import DEFAULTS, OPEN, Session, owner, sessions_of

CPU = torch.device("cpu")


def session_for(
    parameters: Iterable[nn.Parameter],
    options: Options,
    source: Mapping[str, object] | None,
    device: torch.device = CPU,
) -> Session:
    """Return the session of a graph: its parameters' own, else that of the same options object, else a new one.

    All models compiled without options are one to the budget, which is the device's.

    Raises:
        UnsupportedError: the parameters belong to several sessions.
        OptionsError: the options ask for another home than that in which the parameters were built; or these, and what
            was compiled with the same options, were built in several homes.
    """
    parameters = list(parameters)
    found = sessions_of(parameters)
    if len(found) > 1:
        raise UnsupportedError(
            "the graph uses parameters of models that were compiled or placed apart; compile them as one model"
        )
    source = DEFAULTS if source is None else source
    session = next(iter(found), None) or _serving(source, device)
    find = unassigned_memory_of_parameter if session is None else unassigned_memory_of
    built_in = {
        unassigned_memory for p in parameters if owner(p) is None and (unassigned_memory := find(p)) is not None
    }
    for unassigned_memory in built_in:
        options = options.at_home(unassigned_memory.home, unassigned_memory.disk_holds, source)
    if built_in and session is not None and not found and not _has_home(session, options):
        gc.collect()  # a model that is gone may be waiting for it
        session = _serving(source, device)
    if len(built_in) > 1 or (built_in and session is not None and not _has_home(session, options)):
        lived_in: list[Any] = [*built_in, *([] if session is None else [session.options])]
        homes = {(at.home, at.disk_holds) for at in lived_in}
        raise OptionsError(
            "parameters of one graph, or of models compiled with equal options, which are one to the budget, live in "
            f"several homes, {' and '.join(f'{home!r} (disk_holds={holds!r})' for home, holds in sorted(homes))}: "
            "build them in one home; or name each model's own home and disk_holds in its options"
        )
    if session is None:
        session = Session(options, source, device, present_nbytes=present_nbytes(parameters, device))
        OPEN.add(session)
    return session


def _serving(source: object, device: torch.device) -> Session | None:
    """Return the open session of a model that was compiled with these very options."""
    return next((s for s in OPEN if s.terms.source is source and s.device == device and not s.is_over), None)


def _has_home(session: Session, options: Options) -> bool:
    return (session.options.home, session.options.disk_holds) == (options.home, options.disk_holds)


def join(session: Session, transport: Transport | None, options: Options) -> None:
    """Tie a session to the ranks over which a graph's parameters are sharded.

    Args:
        transport: None: the graph has no sharded parameters.
        options: of the compilation.

    Raises:
        UnsupportedError: other graphs of the session have ordinary parameters, or the model computes elsewhere than
            the ranks meet, or the options would move saved values.
        DistributedError: these ranks can exchange nothing any more.
    """
    if transport is None:
        return
    transport.check()
    refuse_moved_activations(options)
    if session.transport is transport:
        return
    if session.store.views.parameters():
        raise UnsupportedError(
            "the options are those of another model already, which is not distributed over the same ranks: give each "
            "model a dictionary of its own"
        )
    if session.device != transport.device:
        raise UnsupportedError(
            f"the model computes on {session.device}, and its mesh is on {transport.device}: give chunkc.distribute "
            "the mesh of the device that the model computes on"
        )
    session.store.slots.transport = transport
    session.store.arena.launches_only = session.device.type == "cuda"
    machine, world = session.hardware, transport.world
    num_ranks, num_hosts = world.num_ranks, world.num_hosts
    if session.device.type == "cuda":  # one device is known: its neighbours are alike
        machine = machine.times(-(-num_ranks // num_hosts)).on_hosts(num_hosts)
    of_a_layer = num_ranks // transport.num_ranks
    session.hardware = machine.used_by(num_ranks, num_hosts, transport.num_copies, of_a_layer)
