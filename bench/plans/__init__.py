"""Measurements of plans, without training or with little: bounds, headlines, the simulator's clock, planning time."""
