"""Read the memory of a segment off the wrapper that Inductor generates, without compiling it."""
