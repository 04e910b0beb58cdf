"""Load a model's weights from files, and save them to files, with one tensor in memory at a time."""
