"""Training checkpoints: saved while training goes on, whole or not there at all, resumed to the bit."""

from chunkc.checkpoint.batches import Batches
from chunkc.checkpoint.training import Checkpoint

__all__ = ["Batches", "Checkpoint"]
