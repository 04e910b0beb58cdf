"""Seconds that an all-gather or a reduce-scatter takes between ranks: the costs of rings and of trees.

All ranks have their parts where they are sent from. Both collectives send as much, so they cost alike; what adding up
takes is left out. Each rank has a link of its own to the others, that sends and receives at once.
"""

from __future__ import annotations


def collective_s(nbytes: float, num_ranks: int, bytes_per_s: float, latency_s: float) -> float:
    """The cheaper way of both; nothing for one rank, or for no bytes.

    Args:
        nbytes: of all ranks' parts together.
        bytes_per_s: that a rank sends, and receives.
        latency_s: of a message.
    """
    if num_ranks < 2 or not nbytes:
        return 0.0
    return min(
        ring_s(nbytes, num_ranks, bytes_per_s, latency_s),
        tree_s(nbytes, num_ranks, bytes_per_s, latency_s),
    )


def ring_s(nbytes: float, num_ranks: int, bytes_per_s: float, latency_s: float) -> float:
    """In `num_ranks - 1` steps each rank sends its neighbour a part: the fewest bytes that there can be."""
    steps = num_ranks - 1
    return steps / num_ranks * nbytes / bytes_per_s + steps * latency_s


def tree_s(nbytes: float, num_ranks: int, bytes_per_s: float, latency_s: float) -> float:
    """Parts go up a binary tree to one rank, and all of them from there to every rank: fewer steps, more bytes."""
    depth = (num_ranks - 1).bit_length()
    return ((num_ranks - 1) / num_ranks + 1) * nbytes / bytes_per_s + 2 * depth * latency_s
