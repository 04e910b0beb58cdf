"""Predict what operators allocate inside, beyond their results: on a CPU by measured rules, on a CUDA device by
bounds."""
