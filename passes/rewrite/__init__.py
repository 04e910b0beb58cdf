"""Rewrite graphs: a graph in, a graph out."""
