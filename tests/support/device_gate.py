"""A gate on streams of the GPU made of RAM: what is given to them while it is shut comes when it is opened."""

from __future__ import annotations

import threading
import time
from typing import Protocol

import cuda_in_ram
import torch


class Stream(Protocol):
    cuda_stream: int


class Gate:
    """Stands for work that takes long. At first it is shut on these streams, if any.

    Args:
        at_most_s: how long it is shut at most: what stands behind it may be what would open it.
    """

    def __init__(self, *streams: Stream, at_most_s: float = 20.0) -> None:
        self._at_most_s = at_most_s
        self.shut(*streams)

    def shut(self, *streams: Stream) -> None:
        """Hold back what these streams are given from now on."""
        self._opened = threading.Event()
        for stream in streams:
            cuda_in_ram.enqueue(stream.cuda_stream, lambda opened=self._opened: opened.wait(self._at_most_s))

    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self) -> None:
        self._opened.set()

    def open_soon(self) -> None:
        """Open it while the caller waits in a call."""
        threading.Timer(0.05, self._opened.set).start()

    def open_after(self, stream: torch.cuda.Stream, at_most_s: float) -> None:
        """Open it once a stream has done all that it was given, or had time enough to."""
        give_up_s = time.monotonic() + at_most_s
        while not stream.query() and time.monotonic() < give_up_s:
            time.sleep(0.001)
        self.open()
