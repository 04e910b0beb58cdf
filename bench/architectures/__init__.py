"""Architectures of model libraries, shrunk and trained under chunkc: the parts of `coverage.py`."""
