"""Plan a step: residents, eviction, offload, recompute, updates, and the times of copies."""
