"""Save training checkpoints asynchronously and atomically, and resume from them bit by bit."""

from chunkc.checkpoint.batches import Batches
from chunkc.checkpoint.training import Checkpoint

__all__ = ["Batches", "Checkpoint"]
