"""Small helpers that know nothing of chunks: caches, weak keys, garbage collection, progress, reachable values."""
