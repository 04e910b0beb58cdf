"""Execute a planned graph as a flat list of instructions."""
