"""Predict how much shorter a step would be if chunks stayed in slots from one phase to the next.

    python bench/plans/seams.py [--small] [--only TEXT]

After a backward and after a step chunkc gives every slot back, since users' code may then read and change parameters
and gradients unseen. Here each case is planned as if no code did: the update finds parameters and gradients of the
first groups where the backward had them, or the forward finds their parameters where the update had them. The number of
groups is the best of a few. The simulator of `chunkc explain` times these steps, the step as it is, and one with
`overlap="backward"`. Nothing runs. Prints a table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from peers.baselines import Case, Planned, plan, timed
from rich.console import Console
from rich.table import Table

from chunkc.ir.errors import BudgetError
from chunkc.ir.items import KEEP_ALL
from chunkc.ir.layout import GRAD, PARAM, Chunk
from chunkc.ir.plan import PhasePlan, Position
from chunkc.ir.program import BACKWARD, FORWARD, UPDATE
from chunkc.ir.simulate import RESIDENT_UPDATE, simulate, step_time
from chunkc.optim.update_mode import NONE
from chunkc.passes.planning.room import Room
from chunkc.passes.planning.timeline import plan_phases
from chunkc.passes.planning.update_seconds import tile_s, traffic_s
from chunkc.passes.planning.updates import update_positions, update_tiles
from chunkc.policy.captured_step import profile

CASES = (
    Case("gpt-1b", "rtx3090", 8, "6GiB"),
    Case("gpt-1b", "rtx3090", 1, "6GiB"),
    Case("gpt-1b", "rtx3090", 1, "3GiB"),
    Case("gpt2-xl", "rtx2060-6g", 1),
    Case("gpt2-xl", "rtx3090", 4),
    Case("vit-large", "rtx2060-6g", 16, "2GiB"),
)
SMALL_CASES = (Case("gpt2-small", "rtx2060-6g", 2, "1.2GiB", 256),)

NUM_TRIED = 8
"""Numbers of groups that are tried for each seam."""


MOST_LEFT = 0.5
"""Of the room in an update, what may be left in slots: tiles have the rest."""


class NoRoom(Exception):
    """More would be left than the update has room for."""


@dataclass(frozen=True)
class Finding:
    """Seconds of one step: as it is, with what would be left at each seam, and with updates in the backward."""

    case: Case
    now_s: float
    backward_to_update_s: float
    update_to_forward_s: float
    early_s: float

    @property
    def row(self) -> tuple[str, ...]:
        case = self.case
        others = (self.backward_to_update_s, self.update_to_forward_s, self.early_s)
        gains = [f"{seconds / self.now_s - 1:+.1%}" for seconds in others]
        return case.model, case.hardware, str(case.batch_size), case.budget, f"{self.now_s:.4g} s", *gains


class Seams:
    """The phases of a planned step, to be put together otherwise."""

    def __init__(self, planned: Planned) -> None:
        assert planned.step is not None, "the case does not fit"
        now, request = planned.dry_run, planned.dry_run.runs[0].request
        self.update, self.hardware, self.budget_nbytes = now.update, planned.hardware, now.budget_nbytes
        self.layout, self.resident, self.external_nbytes = (
            now.planner_state.layout,
            now.planner_state.resident,
            request.external_nbytes,
        )
        self.captured = now.captured[0].following(request.context.activation_plan or KEEP_ALL)
        self.step = profile(self.captured, self.layout)
        self.resident_s = traffic_s(planned.updates.nbytes(planned.step)[RESIDENT_UPDATE], self.hardware)
        self.costs_s = {name: cost for run in planned.step.runs for name, cost in run.costs_s().items()}
        self.passes = self._planned(FORWARD, BACKWARD)
        self.passes_s = self._total(self.passes)

    def now_s(self) -> float:
        """Time a step as it is."""
        return self._total([*self.passes, *self._planned(UPDATE, update=self._update((), ()))])

    def to_update_s(self, left: Sequence[int]) -> float:
        """Time a step with these groups' parameters and gradients in slots at the update.

        Raises:
            NoRoom, BudgetError: there is none for it.
        """
        update = self._update(left, (PARAM, GRAD))
        return self._total(self._planned(FORWARD, BACKWARD, UPDATE, update=update))

    def to_forward_s(self, left: Sequence[int]) -> float:
        """Time a step with these groups' parameters in slots at the forward; they are updated last.

        Raises:
            NoRoom, BudgetError: there is none for it.
        """
        update = sorted(self._update(left, (PARAM,)), key=lambda one: one.tile is not None and one.tile.group in left)
        phases = self._planned(UPDATE, FORWARD, BACKWARD, update=update)
        return self._total([*self.passes, *phases]) - self.passes_s  # gradients are at home when the update begins

    def _planned(self, *names: str, update: Sequence[Position] = ()) -> tuple[PhasePlan, ...]:
        positions = {FORWARD: self.step.forward, BACKWARD: self.step.backward, UPDATE: update}
        calls = [replace(one, tile=None) for one in update]  # for a plan; in a backward they would be its updates
        self.costs_s |= {
            one.name: tile_s(self.layout.groups[one.tile.group], one.tile, self.hardware)
            for one in update
            if one.tile is not None
        }
        plan = plan_phases(
            [(name, calls if name == UPDATE else positions[name]) for name in names],
            Room.of(self.layout, self.budget_nbytes, self.external_nbytes, self.resident),
            hardware=self.hardware,
            boundary_nbytes=self.step.boundary_nbytes,
            saved=self.captured.offloaded if BACKWARD in names else (),
        )
        return plan.phases

    def _update(self, left: Sequence[int], kinds: Sequence[str]) -> list[Position]:
        """The update's positions, where these groups' chunks of these kinds are whole in slots."""
        layout, external_nbytes = self.layout, self.update.external_nbytes
        left_nbytes = sum(layout.groups[index].nbytes(kind) for index in left for kind in kinds)
        room_nbytes = Room.of(layout, self.budget_nbytes, external_nbytes, self.resident).left_nbytes
        if left_nbytes > room_nbytes * MOST_LEFT:
            raise NoRoom
        tiles = update_tiles(layout, self.update.groups, room_nbytes - left_nbytes, self.update.num_stages)
        positions = update_positions(layout, tiles, external_nbytes, self.hardware)

        def whole(chunks: frozenset[Chunk]) -> frozenset[Chunk]:
            return frozenset(chunk.whole if chunk.group in left and chunk.kind in kinds else chunk for chunk in chunks)

        return [
            replace(position, reads=whole(position.reads), writes=whole(position.writes), tile=tile)
            for position, tile in zip(positions, tiles, strict=True)
        ]

    def _total(self, phases: Sequence[PhasePlan]) -> float:
        return step_time(simulate(phases, self.costs_s, self.hardware, resident_update_s=self.resident_s)).total


def examine(case: Case) -> Finding:
    """Time a case with what would be left in slots."""
    seams = Seams(plan(case, NONE, "auto"))
    groups = seams.update.groups
    numbers = sorted({max(1, at * len(groups) // NUM_TRIED) for at in range(NUM_TRIED + 1)})

    def best(seconds: Callable[[Sequence[int]], float]) -> float:
        found = [seams.now_s()]
        for number in numbers:
            with suppress(BudgetError, NoRoom):
                found.append(seconds(groups[:number]))
        return min(found)

    early = plan(case, "backward", "auto")
    assert early.step is not None
    early_s, _ = timed(early, early.step, early.step.phases)
    return Finding(case, seams.now_s(), best(seams.to_update_s), best(seams.to_forward_s), early_s)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one small model, in seconds")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this text in 'model machine batch'")
    options = parser.parse_args(arguments)
    cases = [
        case
        for case in (SMALL_CASES if options.small else CASES)
        if options.only in f"{case.model} {case.hardware} {case.batch_size}"
    ]
    columns = (
        "model",
        "machine",
        "batch",
        "budget",
        "step",
        "backward to update",
        "update to forward",
        "updates in backward",
    )
    table = Table(*columns)
    for case in cases:
        row = examine(case).row
        print(*row, file=sys.stderr, flush=True)
        table.add_row(*row)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
