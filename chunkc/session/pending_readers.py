"""Who reads parameters and their states beside the model's own work, such as a checkpoint that is being written.

What would change or move them waits first. The registry holds parameters weakly; an entry goes with the first wait.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_readers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
os.register_at_fork(after_in_child=lambda: _readers.clear())  # the threads that read are the parent's


def declare_reader(parameters: Iterable[torch.Tensor], done: threading.Event) -> None:
    """Somebody reads these parameters, and states of them, until `done` is set."""
    for parameter in parameters:
        _readers[parameter] = (*(other for other in _readers.get(parameter, ()) if not other.is_set()), done)


def await_readers(parameters: Iterable[torch.Tensor]) -> None:
    """Block until nobody reads these parameters or their states any more."""
    if not _readers:
        return
    for parameter in parameters:
        for done in _readers.get(parameter, ()):
            done.wait()
        _readers.pop(parameter, None)
