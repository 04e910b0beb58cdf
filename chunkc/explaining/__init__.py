"""Predict a training step's bytes and seconds before anything runs or is allocated."""
