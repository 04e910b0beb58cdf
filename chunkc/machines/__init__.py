"""Machines in numbers: by name, by file, as measured, and the one at hand."""
