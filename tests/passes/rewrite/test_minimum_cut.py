"""The cut is networkx's, to the node, also where several are minimal."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import networkx
import pytest

from chunkc.passes.rewrite.minimum_cut import sink_side


def network(seed: int) -> networkx.DiGraph:
    """Values with a node for what goes in and one for what comes out, as the partitioner makes them; few capacities."""
    draw = random.Random(seed)
    graph = networkx.DiGraph()
    num_values = draw.randrange(2, 30)
    graph.add_node("source")
    graph.add_node("sink")
    for at in range(num_values):
        graph.add_edge(f"{at}_in", f"{at}_out", capacity=draw.choice((0, 1, 2, 2, 3, 7.0, math.inf)))
        for user in range(at + 1, min(at + 6, num_values)):
            if draw.random() < 0.4:
                graph.add_edge(f"{at}_out", f"{user}_in", capacity=draw.choice((math.inf, math.inf, 2)))
        if at == 0 or draw.random() < 0.2:
            graph.add_edge("source", f"{at}_in", capacity=math.inf)
        if at == num_values - 1 or draw.random() < 0.15:
            graph.add_edge(f"{at}_{draw.choice(('in', 'out', 'out', 'out'))}", "sink", capacity=math.inf)
    return graph


def test_the_cut_is_the_one_that_networkx_finds() -> None:
    sizes = set()
    for seed in range(400):
        graph = network(seed)
        found = sink_side(graph.edges(data="capacity", default=math.inf), "source", "sink")
        try:
            _, (_, expected) = networkx.minimum_cut(graph, "source", "sink")
        except networkx.NetworkXUnbounded:
            expected = None
        assert found == expected, seed
        sizes.add(None if found is None else len(found))
    assert None in sizes
    assert len(sizes) > 10


@pytest.mark.parametrize("num_values", [2, 50])
def test_of_equal_cuts_it_is_the_one_next_to_the_sink(num_values: int) -> None:
    chain = ["source", *(f"v{at}" for at in range(num_values)), "sink"]
    edges = [(a, b, 1.0) for a, b in pairwise(chain)]
    assert sink_side(edges, "source", "sink") == {"sink"}
