"""Cases of a database trained under chunkc, cell by cell: what `coverage.py` and `conformance.py` share."""
