"""Check a rewritten graph independently of the planner that made it."""
