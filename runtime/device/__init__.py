"""The device that computes: its tier of memory, its streams and its allocator."""
