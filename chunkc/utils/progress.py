"""Show a progress line on standard error during long compilations, if standard error is a terminal."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

DELAY_S = 2.0
"""Compilations that end sooner show nothing, in seconds."""

Show = Callable[[str, int, int | None], None]
"""Called with the name of a stage, the number of its parts that are done, and their total (None: unknown)."""


@contextmanager
def compilation_progress(console: Console | None = None, delay_s: float | None = None) -> Iterator[Show]:
    """Give a function that shows the current stage; the line appears after `delay_s` seconds and is erased at the end.

    Of several processes of a training run (`RANK` is set), only rank 0 shows it.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal or int(os.environ.get("RANK") or 0) != 0:
        yield lambda what, done, of: None
        return
    columns = (SpinnerColumn(), TextColumn("chunkc: {task.description}"), BarColumn(), TimeElapsedColumn())
    # Not redirected: the program may write to standard output and error meanwhile.
    progress = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    task = progress.add_task("compiling", total=None)
    may_begin = threading.Lock()  # so that the timer cannot start the line after the end
    is_over = False

    def begin() -> None:
        with may_begin:
            if not is_over:
                progress.start()

    timer = threading.Timer(DELAY_S if delay_s is None else delay_s, begin)
    timer.daemon = True
    timer.start()
    try:
        yield lambda what, done, of: progress.update(task, description=what, completed=done, total=of)
    finally:
        timer.cancel()
        with may_begin:
            is_over = True
        progress.stop()
