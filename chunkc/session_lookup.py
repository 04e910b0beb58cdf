"""Which session a graph that is being compiled belongs to."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from chunkc.ir.errors import OptionsError, UnsupportedError
from chunkc.movable import present_nbytes
from chunkc.options import Options
from chunkc.runtime.nursery import birthplace_of, nursery_of
from chunkc.session import DEFAULTS, OPEN, Session, owner, sessions_of

CPU = torch.device("cpu")


def session_for(
    parameters: Iterable[nn.Parameter],
    options: Options,
    source: Mapping[str, object] | None,
    device: torch.device = CPU,
) -> Session:
    """The session of a graph being compiled: its parameters' own, else that of the same options object, else new.

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
    find = birthplace_of if session is None else nursery_of
    nurseries = {nursery for p in parameters if owner(p) is None and (nursery := find(p)) is not None}
    for nursery in nurseries:
        options = options.at_home(nursery.home, nursery.disk_holds, source)
    if nurseries and session is not None and not found and not _has_home(session, options):
        gc.collect()  # a model that is gone may be waiting for it
        session = _serving(source, device)
    if len(nurseries) > 1 or (nurseries and session is not None and not _has_home(session, options)):
        lived_in: list[Any] = [*nurseries, *([] if session is None else [session.options])]
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
    """The session of what was compiled with these very options."""
    return next((s for s in OPEN if s.terms.source is source and s.device == device and not s.is_over), None)


def _has_home(session: Session, options: Options) -> bool:
    return (session.options.home, session.options.disk_holds) == (options.home, options.disk_holds)
