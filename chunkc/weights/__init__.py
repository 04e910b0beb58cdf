"""Weights in files: read into a model and written out of it, one tensor in memory at a time."""
