"""C++ kernels compiled side by side, before the segments that use them are compiled one after the other.

Most of a cold start is the C++ compiler's. Inductor starts it for all kernels of one graph, and waits for these before
it goes on to the next graph. So the wrappers of all graphs are generated first, and their kernels handed to Inductor's
own cache and threads, where each graph finds them. Nothing is loaded here, and nothing decides what is compiled: a
kernel that nobody asks for later is wasted time, and one that was not begun, or failed, is compiled by who needs it.
"""

from __future__ import annotations

import ast
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from chunkc.passes.inductor.wrapper_reader import compilations
from chunkc.torch_private.inductor import begin_kernel, cache_dir, get_compile_threads, on_compile_thread


def compiles_side_by_side() -> bool:
    """Whether Inductor may compile kernels beside what else it does (`TORCHINDUCTOR_COMPILE_THREADS`)."""
    return get_compile_threads() > 1


@contextmanager
def started_kernels() -> Iterator[Callable[[str], None]]:
    """Gives a function that begins to compile the C++ kernels in a wrapper's source, and does not wait for them.

    They are compiled in the order in which they are given, as many at a time as Inductor allows. What is not begun when
    the block is left is not begun any more.
    """
    is_over = threading.Event()

    def compile_ahead(compile_kernel: Callable[[], None]) -> None:
        # Who needs the kernel calls this function again, which does nothing where it is there, and hears why it failed.
        if not is_over.is_set():
            with suppress(Exception):
                compile_kernel()

    def submit(compile_kernel: Callable[[], None]) -> object:
        return on_compile_thread(lambda: compile_ahead(compile_kernel))

    def start(source: str) -> None:
        for call in compilations(source):
            if call.compiler == "cpp_pybinding":
                types, code = map(ast.literal_eval, call.arguments)
                begin_kernel(types, code, submit)

    try:
        yield start
    finally:
        is_over.set()


class CompiledBefore:
    """Notes in Inductor's cache directory of what was compiled there, by anything that tells it apart.

    A note says where it is not worth the time to look for kernels that are still to be compiled, and no more: a wrong
    one costs time.
    """

    def __contains__(self, content: str) -> bool:
        return self._note_on(content).exists()

    def add(self, content: str) -> None:
        note = self._note_on(content)
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()

    def _note_on(self, content: str) -> Path:
        key = hashlib.sha256(f"{torch.__version__}\n{content}".encode()).hexdigest()
        return Path(cache_dir()) / "chunkc" / "compiled" / key
