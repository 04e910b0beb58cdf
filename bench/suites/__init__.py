"""The suites of `run.py`, and the processes that they start."""
