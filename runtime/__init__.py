"""Middle floor: what a plan becomes when it runs. Homes, streams, slots, the chunk store and the executor."""
