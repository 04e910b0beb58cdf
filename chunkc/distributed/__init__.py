"""Compare what ranks must have in common before they exchange anything; cut models by tensor parallelism."""
