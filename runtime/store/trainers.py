"""Note which thread trains which parameters: no other thread may read their `.grad`.

`parameter.grad = None` is not atomic in PyTorch (it releases the interpreter's lock while it frees the gradient, and
only then clears the reference), nor are the writes of a CPU backward. A thread that reads `.grad` meanwhile reads
memory that is being freed. Several threads share a session, so each reads only the gradients that it trains itself.
"""

from __future__ import annotations

import threading


class Trainers:
    """Threads that ran backwards or steps of one session, by the parameters that took part."""

    def __init__(self) -> None:
        self._threads: dict[frozenset[str], int] = {}
        self._works_for: dict[int, int] = {}

    def claim(self, names: frozenset[str], thread: int | None = None) -> None:
        """Note that a thread, this one by default, trains these parameters from now on, and no other does.

        If `thread` is another one, this thread works for it until its next claim: on CUDA, backwards run in a thread of
        autograd's, while the calling thread waits.
        """
        here = threading.get_ident()
        self._works_for[here] = self._threads[names] = here if thread is None else thread

    def trained_by_others(self) -> frozenset[str]:
        """Return the parameters with a `.grad` that this thread must not read."""
        here = self._works_for.get(threading.get_ident(), threading.get_ident())
        others = [names for names, thread in self._threads.items() if thread != here]
        if not others:
            return frozenset()
        own = [names for names, thread in self._threads.items() if thread == here]
        return frozenset[str]().union(*others).difference(*own)
