"""Machines in numbers: by name, from a file, as measured, and the local one."""
