"""Learn from the forwards of a step of several graphs whether the whole step fits with all saved values kept.

In the first step, what later graphs save is not known (see `activation_search.may_keep`). From the second step on it
is: where everything fits, each graph keeps what it saves, as a graph that is the whole model does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chunkc.ir.items import ActivationPlan
from chunkc.ir.layout import ChunkLayout
from chunkc.passes.planning.room import Room, everything
from chunkc.policy.captured_step import Captured, profile
from chunkc.policy.graph_fraction import NEARLY_ALL

MAX_FORWARDS = 4096
"""A step of so many forwards, or of a program that calls no backward, is not looked at."""


@dataclass(frozen=True)
class SeenForward:
    """A graph's forward in a step.

    Attributes:
        captured: the graph, at the sizes of the call.
        parameters: those that its backward trains; `graph_fraction`: as of the graph.
        most_nbytes: at the fullest moment of any phase, if all saved values are kept.
        external_nbytes: the most external bytes of its phases so far.
        away_nbytes: of saved values that are offloaded or dropped. If they were kept, later graphs would have as many
            external bytes more.
    """

    captured: weakref.ref[Captured]
    parameters: frozenset[str]
    graph_fraction: float
    most_nbytes: int
    external_nbytes: int
    away_nbytes: int

    @staticmethod
    def of(
        captured: Captured, activation_plan: ActivationPlan, layout: ChunkLayout, external_nbytes: int
    ) -> SeenForward:
        kept_nbytes = captured.following(activation_plan).kept_nbytes
        return SeenForward(
            weakref.ref(captured),
            captured.trained,
            captured.graph_fraction,
            profile(captured, layout).most_nbytes,
            external_nbytes,
            max(0, captured.kept_nbytes - kept_nbytes),
        )


def covers_model(forwards: Sequence[SeenForward], layout: ChunkLayout) -> bool:
    """Whether graphs train nearly all of their model together, so that no other graph is to come."""
    specs = layout.specs()

    def numel(names: frozenset[str]) -> int:
        return sum(specs[name].whole_numel for name in names)

    fractions = [(numel(seen.parameters), seen.graph_fraction) for seen in forwards if seen.graph_fraction < 1]
    of_model = max((own / fraction for own, fraction in fractions), default=0)
    trained = frozenset(name for seen in forwards for name in seen.parameters)
    return 0 < NEARLY_ALL * of_model <= numel(trained)


def keeps_all(forwards: Sequence[SeenForward], layout: ChunkLayout, budget_nbytes: int) -> bool:
    """Whether a step of these forwards fits with all saved values kept and all groups resident."""
    if layout.cut:
        return False
    room, kept_more_nbytes = Room.of(layout, budget_nbytes, resident=everything(layout)), 0
    for seen in forwards:
        if seen.most_nbytes + seen.external_nbytes + kept_more_nbytes > room.left_nbytes:
            return False
        kept_more_nbytes += seen.away_nbytes
    return True


class SeenSteps:
    """The forwards of the running step, and of the latest one that covered the model and fits with all values kept.

    A step is what begins with the first forward after a backward.
    """

    def __init__(self) -> None:
        self._running: list[SeenForward] = []
        self._had_backward = False
        self._fitting: tuple[SeenForward, ...] = ()

    def forward_begins(self, captured: Captured, layout: ChunkLayout, budget_nbytes: int) -> bool:
        """Note that a forward begins, and return whether its step is known to fit with all values kept.

        It is known if a step with the same graph, at the same sizes, has fitted.
        """
        if self._had_backward:
            if len(self._running) < MAX_FORWARDS and covers_model(self._running, layout):
                fits = keeps_all(self._running, layout, budget_nbytes)
                self._fitting = tuple(self._running) if fits else ()
            self._running, self._had_backward = [], False
        return any(seen.captured() is captured for seen in self._fitting)

    def forward_ran(
        self, captured: Captured, activation_plan: ActivationPlan, layout: ChunkLayout, external_nbytes: int
    ) -> None:
        """Note a forward, with the external bytes that its plan counts."""
        if len(self._running) < MAX_FORWARDS:
            self._running.append(SeenForward.of(captured, activation_plan, layout, external_nbytes))

    def backward_ran(self, captured: Captured, external_nbytes: int) -> None:
        """Note a backward, with the external bytes that its plan counts."""
        self._had_backward = True
        for at, seen in enumerate(self._running):
            if seen.captured() is captured and seen.external_nbytes < external_nbytes:
                self._running[at] = replace(seen, external_nbytes=external_nbytes)
