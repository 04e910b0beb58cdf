"""Middle floor: from a captured graph to a plan, by pure functions."""
