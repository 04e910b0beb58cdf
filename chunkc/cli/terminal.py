"""How the command speaks: answers, errors and progress, for any output there is."""

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
    """Have an output and an error output that take any text, also where a shell closed them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(what: str) -> None:
    """One line on standard error."""
    sys.stderr.write(one_line(f"chunkc: {what}") + "\n")


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Inside, the answer is written to the standard output.

    Raises:
        OptionsError: it cannot be, as on a full disk.
        BrokenPipeError: nobody reads it any more.
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
    """Let nobody write what is still buffered, as Python does at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """What is being done, on standard error, where that is a terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what: bar.update(task, description=one_line(what))
