"""Plan a step: residents, eviction, offload, recompute, updates, and when copies begin."""
