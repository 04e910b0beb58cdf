"""Trace a Dynamo graph through AOTAutograd into a forward and a backward, and describe both."""
