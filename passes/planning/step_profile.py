"""Describe the needs of a graph's step, call by call, before any budget is known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from chunkc.ir.plan import Position
from chunkc.passes.planning.offload import Saved

CallNeed = tuple[int, int, float, str]
"""Bytes at a call's peak, bytes once it is over, seconds, and the operation at the peak."""


@dataclass(frozen=True)
class CallNeeds:
    """Bytes and seconds of a step's calls, as far as plans depend on them.

    Attributes:
        calls: of both phases: bytes at the call's peak, bytes once it is over, seconds, and the operation at the peak.
        boundary_nbytes, caller_nbytes: as of a `StepProfile`.
    """

    calls: tuple[CallNeed, ...]
    boundary_nbytes: int
    caller_nbytes: int

    @cached_property
    def digest(self) -> str:
        """A hash that equal needs have in common, on every rank."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()

    @staticmethod
    def most(needs_of_ranks: Sequence[CallNeeds]) -> CallNeeds:
        """Return the elementwise maximum; each call's operation is that of a rank with the largest peak there."""
        calls = []
        for call_of_ranks in zip(*(needs.calls for needs in needs_of_ranks), strict=True):
            peak_nbytes, left_nbytes, cost_s, _ = (max(values) for values in zip(*call_of_ranks, strict=True))
            op = next(op for nbytes, _, _, op in call_of_ranks if nbytes == peak_nbytes)
            calls.append((peak_nbytes, left_nbytes, cost_s, op))
        return CallNeeds(
            tuple(calls),
            max(needs.boundary_nbytes for needs in needs_of_ranks),
            max(needs.caller_nbytes for needs in needs_of_ranks),
        )


@dataclass(frozen=True)
class StepProfile:
    """Needs of a graph's step, before any budget is known.

    Attributes:
        forward, backward: positions of the phases (backward empty in inference).
        update: one position per trainable group: the smallest part of its update (empty in inference).
        boundary_nbytes: held between forward and backward: inputs, saved values, outputs with room for a loss.
        caller_nbytes: held by the forward's caller when the optimizer steps.
    """

    forward: tuple[Position, ...]
    backward: tuple[Position, ...]
    update: tuple[Position, ...]
    boundary_nbytes: int
    caller_nbytes: int

    @cached_property
    def passes(self) -> tuple[Position, ...]:
        return self.forward + self.backward

    @cached_property
    def all(self) -> tuple[Position, ...]:
        return self.passes + self.update

    @property
    def most_nbytes(self) -> int:
        """Non-model bytes at the fullest position."""
        return max((position.non_model_nbytes for position in self.all), default=0)

    @cached_property
    def call_needs(self) -> CallNeeds:
        """Bytes and seconds of the calls, for other ranks."""
        calls = tuple((call.non_model_nbytes, call.left_nbytes, call.cost_s, call.op) for call in self.passes)
        return CallNeeds(calls, self.boundary_nbytes, self.caller_nbytes)

    def with_offloaded(self, saved: Sequence[Saved]) -> StepProfile:
        """Offload saved storages between the phases: equal to a new `profile`, without another liveness analysis."""
        away, left = [0] * (len(self.forward) + 1), [0] * (len(self.forward) + 1)
        back = [0] * (len(self.backward) + 1)
        for storage in saved:
            left[storage.last] += storage.nbytes
            away[storage.last + 1] += storage.nbytes
            back[storage.first] += storage.nbytes
        forward = zip(self.forward, accumulate(away), accumulate(left))
        gone = list(accumulate(reversed(back)))[::-1]  # of each call, the bytes that come back at it or later
        return StepProfile(
            tuple(call.with_less(nbytes, left_nbytes) for call, nbytes, left_nbytes in forward),
            tuple(call.with_less(nbytes, nbytes) for call, nbytes in zip(self.backward, gone[1:])),
            self.update,
            self.boundary_nbytes - sum(storage.nbytes for storage in saved),
            self.caller_nbytes,
        )


def at_least(positions: Sequence[Position], calls: Sequence[CallNeed]) -> tuple[Position, ...]:
    """Raise positions to the bounds of their calls, where they need less."""
    return tuple(
        replace(
            position,
            non_model_nbytes=max(position.non_model_nbytes, nbytes),
            left_nbytes=max(position.left_nbytes, left_nbytes),
            cost_s=max(position.cost_s, cost_s),
            op=op,
        )
        for position, (nbytes, left_nbytes, cost_s, op) in zip(positions, calls, strict=True)
    )
