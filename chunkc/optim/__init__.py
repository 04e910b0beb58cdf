"""Optimizers with `torch.optim`'s semantics that update chunk by chunk, inside the memory budget."""

from chunkc.optim import hint
from chunkc.optim.adam import Adam, AdamW
from chunkc.optim.lamb import LAMB
from chunkc.optim.lion import Lion
from chunkc.optim.sgd import SGD

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Lion"]

hint.install()
