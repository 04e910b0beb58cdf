"""Compare what the ranks of a training run must have in common, at points that all of them pass.

Each rank plans by itself, from the same facts. Facts that differ by rank, such as external bytes, are gathered, and all
ranks plan for the maximum. All other facts are compared before anything moves: the code, the layout and the options of
a graph that is compiled, each new plan, and at the beginning of every phase its name. A rank that cannot continue sends
its error there, and the others raise it.
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
"""Names of facts, as error messages show them -> texts, which must be equal on all ranks."""


@dataclass(frozen=True)
class _Refusal:
    """A message of a rank that raised an error instead of taking part in an agreement."""

    message: str


@dataclass(frozen=True)
class _Said:
    """A rank's message at an agreement.

    Attributes:
        facts: compared with those of the other ranks.
        result: this rank's own: its `Here`, or the result of its action in `together`.
        problem: text of the error that its action raised.
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
        history: where that step's plans come from (see `tracing.steps.SizedStep`); None: it has none in common.
        code: a hash of the graph's code, which must be equal on ranks with the same `needs` and `kind`.
        kind: whether the graph's sizes are symbols, and how many.
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
    """Give a function that compares this rank's facts with those of all ranks; without a transport it does nothing.

    Call it at most once, and not at all if there is nothing to compare. If this rank fails before the comparison, it
    sends its error to the ranks that wait there. With tensor parallelism it also sends any error to all ranks, which
    wait where a phase begins.

    Args:
        not_final: errors that are not sent: this rank tries again.

    Raises:
        DistributedError: facts differ, a rank is gone, or another rank has sent an error.
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
            if transport.world is not transport:  # all ranks wait where a phase begins
                refuse(transport.world, error)
        raise


def refuse(transport: Transport, error: Exception) -> None:
    """Send an error to the other ranks at their next agreement, in place of facts; they raise it."""
    with suppress(DistributedError):
        transport.all_gather(_Refusal(f"{type(error).__name__}: {str(error) or error.__cause__}"))


def agree(transport: Transport, facts: Facts) -> None:
    """Compare facts by hash; all ranks call this.

    Raises:
        DistributedError: facts differ, a rank is gone, or another rank has sent an error.
    """
    _heard(transport, _Said({name: hashed(text) for name, text in facts.items()}))


def begin_phase(transport: Transport, own: Here, facts: Facts) -> list[Here]:
    """Compare facts, and return the state of each rank at the beginning of a phase; all ranks call this.

    Raises:
        DistributedError: as `agree`; or the code differs between ranks with the same needs and kind.
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
    """Perform an action on all ranks, wait for all, and return the result of each, by rank; results are pickled.

    Without a transport, perform it in this process alone. An error of the action on this rank is raised as it is.

    Args:
        phase: the action's name in messages.
        error: class of the error that is raised if the action failed on another rank.

    Raises:
        DistributedError: a rank is gone, or performs another action.
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
    """Describe a fact that differs, and the ranks that differ from its most frequent value.

    Args:
        values: of each rank; if several are the most frequent, the value of the lowest rank counts.
    """
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
    """Hash a long text, to compare the hash in its place: 128 bits of BLAKE2b, in hexadecimal."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def transport_of(named: Mapping[str, nn.Parameter]) -> Transport | None:
    """Find the transport of the ranks that have shards of these parameters; None: they are not sharded.

    Raises:
        UnsupportedError: some parameters are sharded and others are not, or over other ranks.
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
    """Refuse options that let saved values be offloaded or recomputed.

    Raises:
        UnsupportedError: `activations` is not "keep".
    """
    if options.activations != "keep":
        raise UnsupportedError('distributed models keep what the forward saves (activations="keep") so far')
