"""Which thread trains which parameters: no other one may look at their `.grad`.

`parameter.grad = None` is not atomic in PyTorch (it lets go of the interpreter's lock while it frees the gradient, and
only then forgets it), nor is what a CPU backward writes. Who reads `.grad` in another thread meanwhile, reads memory
that is being freed. A session is one for several threads, so each looks at the gradients of what it trains itself.
"""

from __future__ import annotations

import threading


class Trainers:
    """The threads that ran backwards or steps of one session, by the parameters that took part."""

    def __init__(self) -> None:
        self._threads: dict[frozenset[str], int] = {}
        self._works_for: dict[int, int] = {}

    def claim(self, names: frozenset[str], thread: int | None = None) -> None:
        """Note that a thread, this one by default, trains these parameters from now on, and no other does.

        Where `thread` is another one, this one works for it until it claims again: on CUDA, backwards run in a thread
        of autograd's, while the one that called waits.
        """
        here = threading.get_ident()
        self._works_for[here] = self._threads[names] = here if thread is None else thread

    def trained_by_others(self) -> frozenset[str]:
        """The parameters whose `.grad` this thread must not read."""
        here = self._works_for.get(threading.get_ident(), threading.get_ident())
        others = [names for names, thread in self._threads.items() if thread != here]
        if not others:
            return frozenset()
        own = [names for names, thread in self._threads.items() if thread == here]
        return frozenset[str]().union(*others).difference(*own)
