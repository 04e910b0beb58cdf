"""Compare what the ranks of one training must have in common, at points that all of them pass.

Each makes its plans by itself, of the same facts. What a rank alone knows, such as the bytes that its program holds, is
made a fact of all: the largest of any rank. Everything else is compared by hash, before anything moves: the code, the
layout and the options of a graph that is compiled, each new plan, and at the beginning of every phase which one it is.
A rank that cannot go on says so there, and the others raise what it said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from chunkc.ir.errors import ChunkcError, DistributedError, UnsupportedError
from chunkc.options import Options
from chunkc.runtime.distributed.transport import AGREEMENTS, Transport
from chunkc.runtime.store.shards import LocalShard

T = TypeVar("T")

Facts = Mapping[str, str]
"""What is compared: its name in messages, and a text that is equal on all ranks."""


@dataclass(frozen=True)
class _Refusal:
    """A message of a rank that raised an error instead of coming to an agreement."""

    message: str


@dataclass(frozen=True)
class _Said:
    """A rank's message at an agreement: facts to be compared, and a result that only this rank has.

    The result is what a phase begins with, or what an action returned that ranks perform collectively.
    """

    facts: dict[str, str]
    result: Any = None
    problem: str | None = None


@dataclass(frozen=True)
class Here:
    """A rank's state at the beginning of a phase.

    Attributes:
        nbytes: external bytes on the rank, besides the phase.
        outdated: groups with a replicated copy that differs from this rank's shard at home.
        needs: a hash of what the phase's step needs at its sizes.
        history: of that step's plans (see `SizedStep`).
        code: a hash of the graph's code, which is the same on ranks of the same `needs` and `kind`.
        kind: whether its sizes are symbols, and how many of its inputs are.
    """

    nbytes: int
    outdated: tuple[int, ...] = ()
    needs: str = ""
    history: str | None = None
    code: str = ""
    kind: str = ""


@contextmanager
def rendezvous(
    transport: Transport | None, not_final: tuple[type[BaseException], ...] = ()
) -> Iterator[Callable[[Callable[[], Facts]], None]]:
    """Give a function that compares this rank's facts with those of all ranks, once; without a transport it does
    nothing.

    A rank that needs no comparison does not call it. A rank that fails says so at the ranks' next rendezvous.

    Args:
        not_final: errors after which this rank tries again.

    Raises:
        DistributedError: facts differ, a rank is gone, or another rank has raised an error inside.
    """
    met = transport is None

    def compare(facts: Callable[[], Facts]) -> None:
        nonlocal met
        if transport is not None:
            own = facts()
            met = True
            agree(transport, own)

    try:
        yield compare
    except Exception as error:
        if transport is not None and not isinstance(error, not_final):
            if not met:
                refuse(transport, error)
            if transport.world is not transport:  # they wait where a phase begins
                refuse(transport.world, error)
        raise


def refuse(transport: Transport, error: Exception) -> None:
    """Instead of coming to an agreement, a rank says why it cannot: the others raise that."""
    with suppress(DistributedError):
        transport.all_gather(_Refusal(f"{type(error).__name__}: {str(error) or error.__cause__}"))


def agree(transport: Transport, facts: Facts) -> None:
    """Compare facts; all ranks call this.

    Raises:
        DistributedError: they differ, a rank is gone, or has raised an error.
    """
    _heard(transport, _Said({name: hashed(text) for name, text in facts.items()}))


def begin_phase(transport: Transport, own: Here, facts: Facts) -> list[Here]:
    """Compare facts as `agree` does, and return the state of each rank at the beginning of a phase.

    Raises:
        DistributedError: as `agree`.
    """
    said: list[Here] = [one.result for one in _heard(transport, _Said(dict(facts), own))]
    codes: dict[tuple[str, str], str] = {}
    for one in said:
        if codes.setdefault((one.needs, one.kind), one.code) != one.code:
            raise DistributedError(_difference("the code of the model", [one.code for one in said]))
    return said


def together(
    transport: Transport | None,
    phase: str,
    action: Callable[[], T],
    error: type[ChunkcError],
    channel: str = AGREEMENTS,
) -> list[T]:
    """Perform an action on all ranks, and return the result of each; without a transport, of this process alone.

    Args:
        phase: the action's name in messages.
        error: what is raised where another rank could not do it.

    Raises:
        DistributedError: a rank is gone, or does something else. And whatever the action raises here.
    """
    if transport is None:
        return [action()]
    facts = {"the phase": phase}
    try:
        own = _Said(facts, result=action())
    except BaseException as problem:
        with suppress(DistributedError):
            _heard(transport, _Said(facts, problem=_shown(problem)), channel)
        raise
    said = _heard(transport, own, channel)
    for rank, one in enumerate(said):
        if one.problem is not None:
            raise error(f"rank {rank} of {transport.num_ranks}: {one.problem}")
    return [one.result for one in said]


def _shown(problem: BaseException) -> str:
    reason = problem.strerror if isinstance(problem, OSError) else None
    return reason or str(problem) or type(problem).__name__


def _heard(transport: Transport, own: _Said, channel: str = AGREEMENTS) -> list[_Said]:
    said = transport.all_gather(own, channel)
    for rank, value in enumerate(said):
        if isinstance(value, _Refusal):
            raise DistributedError(f"rank {rank} of {transport.num_ranks} cannot go on. {value.message}")
    facts = [one.facts for one in said]
    for name in facts[0]:
        values = [of_rank.get(name) for of_rank in facts]
        if len(set(values)) > 1:
            raise DistributedError(_difference(name, values))
    return said


def _difference(name: str, values: Sequence[str | None]) -> str:
    """Name the ranks that differ from the majority; where both are as many, the first ones."""
    usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
    others = [rank for rank, value in enumerate(values) if value != usual]
    which = ", ".join(map(str, others))
    shown = f": {values[others[0]]} instead of {usual}" if name == "the phase" else ""
    return (
        f"ranks differ in {name}: rank {which} of {len(values)} has another one than the others{shown}. All ranks must "
        "build the same model, run the same code and take the same options; where shapes differ, dynamic=True of "
        "torch.compile may make it the same code"
    )


def hashed(text: str) -> str:
    """A hash of a long text, compared in place of it."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def transport_of(named: Mapping[str, nn.Parameter]) -> Transport | None:
    """The transport of the ranks that train these parameters; None: one process does.

    Raises:
        UnsupportedError: some of the parameters are cut over ranks and others are not, or over other ranks.
    """
    found = {name: p.transport if isinstance(p, LocalShard) else None for name, p in named.items()}
    if len({id(transport) for transport in found.values()}) > 1:
        first = next(iter(found.values()))
        other = next(name for name, transport in found.items() if transport is not first)
        raise UnsupportedError(
            f"{other} is not distributed as {next(iter(found))} is: call chunkc.distribute once, when the model has "
            "all its parameters"
        )
    return next(iter(found.values()), None)


def refuse_moved_activations(options: Options) -> None:
    """Refuse options by which saved values would leave the compute tier.

    Raises:
        UnsupportedError: they would.
    """
    if options.activations != "keep":
        raise UnsupportedError('distributed models keep what the forward saves (activations="keep") so far')
