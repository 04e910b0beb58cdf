"""Helpers of several tests of the runtime."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

from chunkc.runtime.device.streams import JobMark

MIB = 1 << 20


def random_bytes(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def raiser(error: BaseException) -> Callable[[], None]:
    """A job that fails."""

    def job() -> None:
        raise error

    return job


@contextlib.contextmanager
def ctrl_c_in_a_wait(*, when: Callable[[], bool] = lambda: True) -> Iterator[list[str]]:
    """Interrupt the main thread as a terminal does, as soon as it waits for a worker thread's job.

    Args:
        when: a further condition.

    Yields:
        The names of the functions that it was interrupted in, the innermost first; empty until then.
    """
    main, over, where = threading.main_thread().ident, threading.Event(), list[str]()
    assert main is not None

    def watch() -> None:
        while not over.is_set():
            frame, names, codes = sys._current_frames().get(main), [], set()
            while frame is not None:
                names.append(frame.f_code.co_name)
                codes.add(frame.f_code)
                frame = frame.f_back
            if JobMark._block.__code__ in codes and when():
                where.extend(names)
                signal.pthread_kill(main, signal.SIGINT)
                return
            time.sleep(0.002)

    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background may ignore it
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield where
    finally:
        over.set()
        watcher.join()
        signal.signal(signal.SIGINT, former)
