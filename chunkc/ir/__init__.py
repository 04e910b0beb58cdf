"""Describe a plan as data: records, verifier and printers. Ground floor: imports nothing else of chunkc."""
