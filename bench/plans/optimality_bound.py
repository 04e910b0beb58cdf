"""A lower bound on a training step's time under a budget, whatever moves what when: a linear program.

The program knows every call's arithmetic and the bytes that it cannot do without. Whatever else may be evicted is cut
into *gaps*: an item between two of its uses. Of each gap a part is kept, copied away and back, or, of a value that the
forward saved, made again by its call. Between calls, time is cut into windows; copies have a rate in each, and nothing
is in memory before it has been copied there, or gone before it has been copied away. All of it is relaxed to real
numbers: a part of an item may stay, copies may be cut anywhere, recomputed calls need nothing but their seconds. What a
real schedule does is a solution of the program, so its time is no less. A schedule is one of a step that ends with
everything up to date where it belongs, as anyone may read it then: what a step has changed is copied home within it.
States are changed once their gradient is complete. Until then what has come of them takes room.

    capacity    at the fullest call of each window: what calls need, what is kept and what is on its way fit the budget
    links       bytes of a window's copies, each way, at the link's rate: no longer than the window
    time        a window is no shorter than its calls, what is made again in it, and its part of the update

With `exact=True` a gap is kept or not, and a value made again or not, as a whole (small instances only).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

NUM_WINDOWS = 24
"""Of a forward and backward together; one more stands for the optimizer's step."""


@dataclass(frozen=True)
class Call:
    """Work of one call.

    Attributes:
        nbytes: that the call cannot do without.
        again_s: the fewest seconds of its recomputation; None: `seconds`.
    """

    seconds: float
    nbytes: int
    again_s: float | None = None


@dataclass(frozen=True)
class Gap:
    """An item between two uses, in units of calls.

    Attributes:
        begin, end: it may be evicted during calls `begin` to `end - 1`. Where `end` is not behind `begin` it goes on
            through the optimizer's step into the next step's forward.
        is_dirty: it has to be copied away before it is evicted.
        is_read: it has to be copied back.
        recomputed: the call that makes it again instead; None: only a copy brings it back.
    """

    name: str
    nbytes: int
    begin: int
    end: int
    is_dirty: bool
    is_read: bool = True
    recomputed: int | None = None


@dataclass(frozen=True)
class UpdateWork:
    """The optimizer's step: all its arithmetic, and states that are copied in and out unless they stay for good.

    Attributes:
        early: a group may be updated as soon as its gradient is complete; else after the backward.
        group_nbytes: of each group's states, written and read once a step.
        group_calls: the call that completes each group's gradient.
    """

    seconds: float
    group_nbytes: tuple[int, ...]
    group_calls: tuple[int, ...]
    early: bool


@dataclass(frozen=True)
class Problem:
    """A step under a budget.

    Attributes:
        capacity_nbytes: the budget without what stays whatever is done.
        num_forward: calls of the forward; the others are the backward's.
        inward, outward: bytes per second of the links.
    """

    calls: tuple[Call, ...]
    num_forward: int
    gaps: tuple[Gap, ...]
    update: UpdateWork
    capacity_nbytes: int
    inward: float
    outward: float


@dataclass(frozen=True)
class LowerBound:
    """Seconds of a step, and bytes that it copies at that time, both ways; None: there is no step within the budget."""

    seconds: float | None
    nbytes: float | None


@dataclass
class _Matrix:
    """Rows of a sparse system, `low <= row x <= high`."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: Mapping[int, float], low: float, high: float) -> None:
        row = len(self.low)
        for column, value in terms.items():
            self.rows.append(row)
            self.columns.append(column)
            self.values.append(value)
        self.low.append(low)
        self.high.append(high)


def windows_of(calls: Sequence[Call], num_forward: int, num_windows: int) -> list[int]:
    """The window of each call, such that windows take alike long, and none has calls of both phases."""
    found: list[int] = []
    used = 0
    for phase in (calls[:num_forward], calls[num_forward:]):
        total = sum(call.seconds for call in calls) or 1.0
        share = max(1, round(num_windows * sum(call.seconds for call in phase) / total))
        before, of_phase = 0.0, sum(call.seconds for call in phase) or 1.0
        for call in phase:
            found.append(used + min(share - 1, int(share * (before + call.seconds / 2) / of_phase)))
            before += call.seconds
        used = found[-1] + 1 if found else used
    return found


def lower_bound(
    problem: Problem, *, num_windows: int = NUM_WINDOWS, exact: bool = False, least_bytes: bool = False
) -> LowerBound:
    """Solve the program of a step; `least_bytes` asks for the fewest bytes, however long it takes."""
    calls = problem.calls
    window_of = windows_of(calls, problem.num_forward, num_windows)
    num_passes = max(window_of) + 1
    stepping = num_passes  # the optimizer's window
    matrix, num = _Matrix(), 0

    def new(count: int) -> range:
        nonlocal num
        num += count
        return range(num - count, num)

    nbytes_unit = 1e9  # what a variable of 1 means: keeps the numbers near each other
    duration = new(num_passes + 1)
    kept = new(len(problem.gaps))
    again = {call: new(1)[0] for call in sorted({gap.recomputed for gap in problem.gaps if gap.recomputed is not None})}
    when_again = {call: {w: new(1)[0] for w in _backward_windows(window_of, problem.num_forward)} for call in again}
    update = new(num_passes + 1)
    staying = new(len(problem.update.group_nbytes))
    inward: list[dict[int, float]] = [{} for _ in range(num_passes + 1)]
    outward: list[dict[int, float]] = [{} for _ in range(num_passes + 1)]
    # In each window, what part of a gap is there: the sum of these columns.
    held: list[list[tuple[Gap, dict[int, float]]]] = [[] for _ in range(num_passes + 1)]
    for place, gap in enumerate(problem.gaps):
        size = gap.nbytes / nbytes_unit
        spans = list(_windows(gap, window_of, len(calls), stepping))
        brought = {kept[place]: 1.0} | ({again[gap.recomputed]: 1.0} if gap.recomputed is not None else {})
        flows_in = new(len(spans)) if gap.is_read else range(0)
        if gap.is_read:
            matrix.add(brought | dict.fromkeys(flows_in, 1.0), 1.0, np.inf)
        within = len(spans) if gap.begin < gap.end else stepping + 1 - spans[0]
        flows_out = new(within) if gap.is_dirty else range(0)
        if gap.is_dirty:
            matrix.add(brought | dict.fromkeys(flows_out, 1.0), 1.0, np.inf)
        for order, window in enumerate(spans):
            if gap.is_read:
                inward[window][flows_in[order]] = size
            if gap.is_dirty and order < within:
                outward[window][flows_out[order]] = size
            parts = {kept[place]: 1.0} | dict.fromkeys(flows_in[:order], 1.0)
            if gap.is_dirty:
                # not yet copied away: 1 - kept - made again - what has gone by the end of this window; at least nothing
                waiting = new(1)[0]
                matrix.add({waiting: 1.0} | brought | dict.fromkeys(flows_out[: order + 1], 1.0), 1.0, np.inf)
                parts[waiting] = 1.0
            held[window].append((gap, parts))
    states_held: list[dict[int, float]] = [{} for _ in range(num_passes + 1)]
    for stays, nbytes, call in zip(staying, problem.update.group_nbytes, problem.update.group_calls, strict=True):
        size, first = nbytes / nbytes_unit, window_of[call] if problem.update.early else stepping
        flows_in, flows_out = new(num_passes + 1), new(num_passes + 1 - first)
        for flows in (flows_in, flows_out):
            matrix.add({stays: 1.0} | dict.fromkeys(flows, 1.0), 1.0, np.inf)
        for window in range(num_passes + 1):
            inward[window][flows_in[window]] = size
            gone = flows_out[: max(0, window + 1 - first)]
            if gone:
                outward[window][gone[-1]] = size
                matrix.add(dict.fromkeys(flows_in[: window + 1], 1.0) | dict.fromkeys(gone, -1.0), 0.0, np.inf)
            there = new(1)[0]  # what has come before this window, less what has gone by its end; at least nothing
            came = dict.fromkeys(flows_in[:window], -1.0)
            matrix.add({there: 1.0} | came | dict.fromkeys(gone, 1.0), 0.0, np.inf)
            states_held[window] |= {stays: size, there: size}
    if problem.update.early:
        matrix.add(dict.fromkeys(update, 1.0), problem.update.seconds, np.inf)
    else:
        matrix.add({update[stepping]: 1.0}, problem.update.seconds, np.inf)
    for window in range(num_passes + 1):
        matrix.add(inward[window] | {duration[window]: -problem.inward / nbytes_unit}, -np.inf, 0.0)
        matrix.add(outward[window] | {duration[window]: -problem.outward / nbytes_unit}, -np.inf, 0.0)
        own = sum(call.seconds for call, w in zip(calls, window_of) if w == window)
        made = {columns[window]: -_again_s(calls[call]) for call, columns in when_again.items() if window in columns}
        matrix.add({duration[window]: 1.0, update[window]: -1.0} | made, own, np.inf)
    for call, columns in when_again.items():
        matrix.add({again[call]: -1.0} | dict.fromkeys(columns.values(), 1.0), 0.0, np.inf)
    for window in range(num_passes + 1):
        for at in _tightest(problem, window_of, window):
            terms = dict(states_held[window])
            for gap, parts in held[window]:
                if _covers(gap, at, len(calls)):
                    for column, value in parts.items():
                        terms[column] = terms.get(column, 0.0) + value * gap.nbytes / nbytes_unit
            room = problem.capacity_nbytes - (calls[at].nbytes if at < len(calls) else 0)
            matrix.add(terms, -np.inf, room / nbytes_unit)
    costs = np.zeros(num)
    if least_bytes:
        for terms in (*inward, *outward):
            for column, value in terms.items():
                costs[column] += value
    else:
        costs[list(duration)] = 1.0
    integral = np.zeros(num)
    upper = np.full(num, np.inf)
    for column in (*kept, *staying, *again.values()):
        upper[column] = 1.0
        integral[column] = float(exact)
    shape = (len(matrix.low), num)
    system = sparse.csr_matrix((matrix.values, (matrix.rows, matrix.columns)), shape=shape)
    found = milp(
        costs,
        constraints=LinearConstraint(system, np.array(matrix.low), np.array(matrix.high)),
        bounds=Bounds(np.zeros(num), upper),
        integrality=integral if exact else None,
    )
    if found.x is None:
        return LowerBound(None, None)
    moved = sum(found.x[column] * value for terms in (*inward, *outward) for column, value in terms.items())
    return LowerBound(float(sum(found.x[column] for column in duration)), float(moved) * nbytes_unit)


def _again_s(call: Call) -> float:
    return call.seconds if call.again_s is None else call.again_s


def _backward_windows(window_of: Sequence[int], num_forward: int) -> list[int]:
    return sorted(set(window_of[num_forward:]))


def _covers(gap: Gap, at: int, num_calls: int) -> bool:
    """Whether the item may be evicted during a call; call `num_calls` is the optimizer's step."""
    if gap.begin < gap.end:
        return gap.begin <= at < gap.end
    return at >= gap.begin or at < gap.end


def _windows(gap: Gap, window_of: Sequence[int], num_calls: int, stepping: int) -> Iterator[int]:
    """The windows in which the item may be evicted, in order."""
    if gap.begin < gap.end:
        last = stepping if gap.end > num_calls else window_of[gap.end - 1]
        yield from range(window_of[gap.begin] if gap.begin < num_calls else stepping, last + 1)
        return
    first = window_of[gap.begin] if gap.begin < num_calls else stepping
    yield from range(first, stepping + 1)
    if gap.end > 0:
        yield from (window for window in range(window_of[gap.end - 1] + 1) if window < first)


def _tightest(problem: Problem, window_of: Sequence[int], window: int) -> list[int]:
    """The calls of a window to ask for room at: the one that needs most, the first and the last. Fewer only relax."""
    if window > max(window_of):
        return [len(window_of)]
    own = [at for at, w in enumerate(window_of) if w == window]
    return sorted({own[0], own[-1], max(own, key=lambda at: problem.calls[at].nbytes)}) if own else []
