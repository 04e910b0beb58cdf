"""Chunks on the compute tier: slots, parameter views and gradients."""
