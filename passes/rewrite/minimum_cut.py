"""Find the minimum cut that PyTorch's partitioner asks networkx for, in a fraction of the time.

A network may have several minimum cuts. networkx takes the one with the fewest nodes on the sink's side: those from
which a maximum flow leaves a way to the sink. These are the same for every maximum flow, so that any exact algorithm
decides as networkx does, ties included.

Most values of a joint graph are decided before any flow: no finite cut goes through an edge without limit, so whatever
the source reaches over such edges is on its side (what must not be recomputed), and whatever reaches the sink over
them is on the sink's (what the backward needs). Dinic's algorithm goes through the few that remain; networkx pushes
flow through all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf

Edge = tuple[str, str, float]
"""From one node to another, with a capacity; `inf` where there is no limit."""

Residual = dict[str, dict[str, float]]
"""The flow that may still be sent from one node to another; each edge has an entry in both directions."""


def sink_side(edges: Iterable[Edge], source: str, sink: str) -> set[str] | None:
    """Return the sink's side of the minimum cut in which it is smallest; None if a flow has no limit."""
    edges = list(edges)
    ahead: dict[str, list[str]] = {}
    behind: dict[str, list[str]] = {}
    for tail, head, capacity in edges:
        if capacity == inf:
            ahead.setdefault(tail, []).append(head)
            behind.setdefault(head, []).append(tail)
    of_source, of_sink = _reached(source, ahead), _reached(sink, behind)
    if sink in of_source:
        return None
    stands_for = dict.fromkeys(of_source, source) | dict.fromkeys(of_sink, sink)
    residual: Residual = {source: {}, sink: {}}
    for tail, head, capacity in edges:
        a, b = stands_for.get(tail, tail), stands_for.get(head, head)
        if a not in (b, sink) and b != source and (a, b) != (source, sink):
            # What leads to the source, from the sink, or from one to the other decides nothing.
            onward = residual.setdefault(a, {})
            onward[b] = onward.get(b, 0) + capacity
            residual.setdefault(b, {}).setdefault(a, 0)
    while source in (distance := _distances(residual, sink)):
        _send(residual, distance, source, sink)
    return of_sink | distance.keys()


def _reached(begin: str, successors: Mapping[str, Sequence[str]]) -> set[str]:
    found, pending = {begin}, [begin]
    while pending:
        new = [node for node in successors.get(pending.pop(), ()) if node not in found]
        found.update(new)
        pending += new
    return found


def _distances(residual: Residual, sink: str) -> dict[str, int]:
    """Return how many edges lead from a node to the sink, for all nodes that may still send something there."""
    distance, pending = {sink: 0}, [sink]
    for node in pending:
        for before in residual[node]:
            if before not in distance and residual[before][node] > 0:
                distance[before] = distance[node] + 1
                pending.append(before)
    return distance


def _send(residual: Residual, distance: Mapping[str, int], source: str, sink: str) -> None:
    """Send flow along shortest ways until each has an edge that is full."""
    left = {node: list(residual[node]) for node in distance}
    way = [source]
    while way:
        node = way[-1]
        if node == sink:
            amount = min(residual[a][b] for a, b in pairwise(way))
            for a, b in pairwise(way):
                residual[a][b] -= amount
                residual[b][a] += amount
            way = [source]
            continue
        while left[node]:
            after = left[node][-1]
            if residual[node][after] > 0 and distance.get(after) == distance[node] - 1:
                way.append(after)
                break
            left[node].pop()
        else:
            way.pop()
            if way:
                left[way[-1]].pop()
