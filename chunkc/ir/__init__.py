"""Ground floor: the plan as data. Records, their checker and their printers; imports nothing else of chunkc."""
