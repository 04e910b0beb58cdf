"""Write the command's answers, errors and progress to any kind of output."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from chunkc.ir.errors import OptionsError
from chunkc.ir.text import one_line


def open_streams() -> None:
    """Let standard output and error accept any text, even if a shell has closed them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(what: str) -> None:
    """Write one line to standard error."""
    sys.stderr.write(one_line(f"chunkc: {what}") + "\n")


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Flush the answer that the block writes to standard output, and turn errors in writing into `OptionsError`.

    Raises:
        OptionsError: the answer cannot be written, as on a full disk.
        BrokenPipeError: the reader closed the pipe.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        leave_standard_output()
        raise
    except OSError as error:
        leave_standard_output()
        raise OptionsError(f"cannot write the standard output: {error.strerror}") from None


def leave_standard_output() -> None:
    """Redirect standard output to the null device, so that Python's flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Show progress on standard error, if that is a terminal; yield a function that sets its text."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what: bar.update(task, description=one_line(what))
