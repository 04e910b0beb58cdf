"""Optimizers with `torch.optim`'s semantics that update chunk by chunk, inside the memory budget."""

from chunkc.optim.adam import Adam, AdamW
from chunkc.optim.lamb import LAMB

__all__ = ["LAMB", "Adam", "AdamW"]
