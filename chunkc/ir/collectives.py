"""Estimate the seconds of an all-gather or a reduce-scatter between ranks, by ring and by tree.

Each rank's shard is where it is sent from. Both collectives send the same bytes, so they cost the same; the time of the
additions is left out. Each rank has its own link to the other ranks, which sends and receives at once.
"""

from __future__ import annotations


def collective_s(nbytes: float, num_ranks: int, bytes_per_s: float, latency_s: float) -> float:
    """Return the seconds of the cheaper algorithm; 0 for one rank or no bytes.

    Args:
        nbytes: of the shards of all ranks.
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
    """Return the seconds of a ring, which sends the fewest bytes possible.

    In each of `num_ranks - 1` steps every rank sends a shard to its neighbour.
    """
    steps = num_ranks - 1
    return steps / num_ranks * nbytes / bytes_per_s + steps * latency_s


def tree_s(nbytes: float, num_ranks: int, bytes_per_s: float, latency_s: float) -> float:
    """Return the seconds of a binary tree, which takes fewer steps than a ring and sends more bytes.

    Shards go up to one rank, and all of them back to every rank.
    """
    depth = (num_ranks - 1).bit_length()
    return ((num_ranks - 1) / num_ranks + 1) * nbytes / bytes_per_s + 2 * depth * latency_s
