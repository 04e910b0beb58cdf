"""Middle floor: from a captured graph to a plan. Pure functions; only `segments` and `insert` build FX graphs."""
