"""Detect what the user has changed since the session last looked; every call, backward and step begins with it.

Between calls a model is ordinary PyTorch, so its user may do to it whatever PyTorch allows. Each call of a compiled
graph, each backward and each step of an optimizer begins with `detect_changes`:

- *The data of a parameter at home was replaced* (`p.data = ...`): shows by address and strides. Its values are taken
  home, and it is a home view again. Views of the former data keep its bytes (`ChunkStore.take_over`).
- *The new data is in memory that others share* (processes, other parameters): refused.
- *Another dtype, shape or device*: compared with the layout. A compilation lays the model out anew; a step refuses.
- *One tensor is `.grad` of several parameters, or the user's own*: autograd adds to it, not chunkc, and its room is
  taken from the budget.
- *A parameter was frozen since the forward*: it gets no gradient (`Gradients.sink`).
- *Views are kept of a former gradient*: its storage lives. They keep its bytes (`Gradients.collect`).
- *A parameter was written between forward and backward*: autograd refuses, by version counters.
- *Another thread calls*: it waits (`Session.entered`), and leaves the gradients of parameters that other threads train
  unread (`runtime.store.gradient_states`).
- *The model is gone, or laid out anew*: weak references say so. Everything is given back, and code that was compiled
  for it refuses (`Session.own`).
- *This is a child of `os.fork`*: tensors over a disk home refuse (`runtime.storage.forks`), and so do copies
  (`runtime.streams`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.layout import GRAD, Chunk
from chunkc.ir.strides import span_of
from chunkc.ir.units import format_nbytes
from chunkc.session.logs import logger
from chunkc.session.movable import is_shared_memory, shares_memory
from chunkc.session.pending_readers import await_readers
from chunkc.session.session import Session, owner


def detect_changes(session: Session, names: Iterable[str]) -> bool:
    """Take over the user's changes of these parameters. Return whether there were any.

    Raises:
        UnsupportedError: a change cannot be taken over; nothing has changed.
        StreamError, HomeError: an update or a copy of the parameter's home had failed.
    """
    store = session.store
    replaced = store.replaced(names)
    if not replaced:
        return False
    await_readers(p for name in replaced for p in store.views.in_chunk_of(name).values())  # they have views
    for name in replaced:
        _check_replacement(session, name)
    _check_views(session, frozenset(replaced))
    store.take_over(replaced)
    return True


def forget_gradients(session: Session) -> None:
    """Free the RAM of home gradients that no parameter has any more, until the next gradients come."""
    store = session.store
    unread = store.trainers.trained_by_others()
    indices = [chunk.group for chunk in store.arena.chunks if chunk.kind == GRAD]
    for index in indices:
        names = (where.spec.name for where in store.layout.groups[index].slices)
        if unread.isdisjoint(names) and not store.updates.before(index) and not store.gradients.exist_in(index):
            store.arena.forget(Chunk(GRAD, index))


def _check_replacement(session: Session, name: str) -> None:
    store = session.store
    data, spec = store.views.parameter(name).data, store.layout.specs()[name]
    if (tuple(data.shape), data.dtype, data.device) != (spec.shape, spec.dtype, store.tier.device):
        raise UnsupportedError(
            f"{name} was laid out as {_described(spec.dtype, spec.shape, store.tier.device)}, and is "
            f"{_described(data.dtype, data.shape, data.device)} now: call the compiled model once, which lays it out "
            "anew, before the optimizer's step; or convert it back"
        )
    if session.in_backward.has_begun(store.views.group_index(name)):
        raise UnsupportedError(
            f'the data of {name} was replaced after its update had begun (overlap="backward"): do so after step(), or '
            'use overlap="forward"'
        )
    if is_shared_memory(data):
        raise UnsupportedError(
            f"{name} has been moved into memory that other processes share (share_memory(), or a queue that sent it): "
            "training it would leave that memory. Send copies (`{k: v.clone() for k, v in model.state_dict().items()}`)"
            "; to go on, give the parameter memory of its own: `p.data = p.data.clone()`"
        )
    begin, end = span_of(data)
    for other, parameter in store.views.parameters().items():
        other_begin, other_end = span_of(parameter.data)
        if other != name and begin < other_end and other_begin < end:
            raise UnsupportedError(
                f"the data of {name} and of {other} lie in the same memory now: assign the parameter itself "
                "(`b.weight = a.weight`) to tie two modules, or give each data of its own"
            )


def _check_views(session: Session, replaced: frozenset[str]) -> None:
    """Refuse a replacement of data if the caller keeps views of the former data.

    The chunk's other parameters would need a new home, too.
    """
    store = session.store
    for name in replaced:
        for other, parameter in store.views.in_chunk_of(name).items() if store.views.has_external_views(name) else ():
            if other not in replaced and shares_memory(parameter):
                raise UnsupportedError(
                    f"the data of {name} was replaced, but there are views of its former data and of {other} "
                    "(a state_dict, say): delete them, or clone them before"
                )


def _described(dtype: torch.dtype, shape: Iterable[int], device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"


def end_where_laid_out_otherwise(parameters: Iterable[torch.Tensor]) -> None:
    """End the sessions of parameters that have another dtype, shape or device now, or strides, before a compilation.

    The model is then laid out anew, as if nothing had been compiled for it.
    """
    for parameter in parameters:
        hit = owner(parameter)
        if hit is None:
            continue
        session, name = hit
        spec = session.store.layout.specs().get(name)
        now = (tuple(parameter.shape), tuple(parameter.stride()), parameter.dtype)
        if spec is not None and now != (spec.shape, spec.stride, spec.dtype):
            logger.info("%s is %s now: the model is laid out anew", name, _described(now[2], now[0], parameter.device))
            with session.entered():
                session.store.updates.finish()
                session.store.release_slots()
                session.end()


def note_shared_memory(named: Mapping[str, torch.Tensor]) -> None:
    """Warn of parameters that share their memory with other tensors or processes, so that they cannot move."""
    shared = {name: parameter.nbytes for name, parameter in named.items() if shares_memory(parameter)}
    if shared:
        logger.warning(
            "%s (%s in all) share their memory with other tensors or processes (an earlier state_dict, weights tied "
            "through .data, share_memory()), and stay on the compute tier: delete those, or clone them, before the "
            "first call",
            ", ".join(list(shared)[:3]) + (f" and {len(shared) - 3} more" if len(shared) > 3 else ""),
            format_nbytes(sum(shared.values())),
        )


def gradients_left_to_autograd(session: Session, names: Collection[str]) -> frozenset[str]:
    """Return the parameters for which PyTorch must add to `.grad`, since that very tensor has other references.

    Gradients without other references move home at once. Those that stay on the compute tier count from now on.

    Raises:
        HomeError: there is no room for another home of gradients that have views.
    """
    left = session.store.gradients.find_autograd_owned()
    session.live.watch(session.store.gradients.take_home())
    return left & frozenset(names)
