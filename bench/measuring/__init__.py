"""Processes, metrics, figures and plots that benchmarks share."""
