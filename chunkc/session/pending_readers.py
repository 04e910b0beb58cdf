"""Register background readers of parameters and their states, such as a checkpoint that is being written.

Writers and moves wait for them first. The registry holds parameters weakly; an entry goes with the first wait.
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
    """Register a background reader of parameters and their states; writers block until `done` is set."""
    for parameter in parameters:
        _readers[parameter] = (*(other for other in _readers.get(parameter, ()) if not other.is_set()), done)


def await_readers(parameters: Iterable[torch.Tensor]) -> None:
    """Block until no background reader has these parameters or their states any more."""
    if not _readers:
        return
    for parameter in parameters:
        for done in _readers.get(parameter, ()):
            done.wait()
        _readers.pop(parameter, None)
