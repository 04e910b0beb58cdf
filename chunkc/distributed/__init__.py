"""What ranks agree on before they exchange anything, and models cut by tensor parallelism."""
