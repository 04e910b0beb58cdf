"""Predict the bytes that operators allocate inside, beyond their results: rules on a CPU, upper bounds on CUDA."""
