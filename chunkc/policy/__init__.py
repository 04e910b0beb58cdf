"""Decide, in pure functions: which groups are resident, which activations move, which plan a phase takes."""
