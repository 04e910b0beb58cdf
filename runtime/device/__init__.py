"""Drive the compute device: its memory tier, streams and allocator."""
