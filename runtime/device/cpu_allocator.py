"""Meter torch's CPU allocations to the byte, and hold them to a limit.

A small C++ extension registers an allocator in front of torch's own (`c10::SetCPUAllocator`). Every byte that
torch asks for is charged when it is asked for and uncharged when the block is freed, by whichever thread.
An allocation beyond the limit raises `torch.OutOfMemoryError` and changes nothing.

Charged: storages, and operators' scratch memory that comes from torch's CPU allocator, since `install`. Not
charged: memory allocated before `install`, memory-mapped tensors and `torch.frombuffer`, and what libraries
allocate by themselves (oneDNN and BLAS workspaces, Python objects).

The extension is built once per machine, into torch's own cache of extensions (seconds; a C++ compiler and
ninja needed), and stays installed until the process ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils import cpp_extension

from chunkc.ir.errors import ChunkcError, UnsupportedError

_SOURCE = Path(__file__).with_name("cpu_allocator.cpp")
_NO_LIMIT = -1

_install_lock = threading.Lock()
_library: ctypes.CDLL | None = None  # one per process, as torch's CPU allocator is


def install() -> None:
    """Put the meter in front of torch's CPU allocator; a second call does nothing.

    Raises:
        UnsupportedError: no ninja, no C++ compiler, or another allocator that cannot be metered.
    """
    global _library
    with _install_lock:
        if _library is not None:
            return
        library = _declare(ctypes.CDLL(_build()))
        outcome = library.chunkc_meter_install()
        if outcome != 1:
            reason = "keeps its place by priority" if outcome == 0 else "cannot be metered (no raw deleter)"
            raise UnsupportedError(
                f"another CPU allocator is registered with torch and {reason}; do not register it to limit CPU memory"
            )
        _library = library


def is_installed() -> bool:
    """Whether `install` has succeeded in this process."""
    return _library is not None


def current_nbytes() -> int:
    """Read the bytes allocated since `install` and not freed yet."""
    return _installed().chunkc_meter_current()


def peak_nbytes() -> int:
    """Read the largest `current_nbytes` since `install` or the last `reset_peak`."""
    return _installed().chunkc_meter_peak()


def reset_peak() -> None:
    """Reset the peak to the current bytes."""
    _installed().chunkc_meter_reset_peak()


def lap_peak_nbytes() -> int:
    """Read the largest `current_nbytes` since the last call of this function; does not change `peak_nbytes`."""
    return _installed().chunkc_meter_lap_peak()


def lap_peak_if_installed() -> int | None:
    """Read `lap_peak_nbytes`, or None before `install`. Called twice at every moment of a step."""
    return None if _library is None else _library.chunkc_meter_lap_peak()


def set_limit(nbytes: int | None) -> None:
    """Refuse every allocation that would bring `current_nbytes` above `nbytes`; `None` lifts the limit.

    The limit may be below the current bytes: then nothing can be allocated until enough is freed.
    """
    if nbytes is not None and nbytes < 0:
        raise ValueError(f"a memory limit is a number of bytes, 0 or more, or None; not {nbytes}")
    _installed().chunkc_meter_set_limit(_NO_LIMIT if nbytes is None else nbytes)


def limit_nbytes() -> int | None:
    """Read the limit in bytes, or None when there is none."""
    nbytes = _installed().chunkc_meter_limit()
    return None if nbytes == _NO_LIMIT else nbytes


@contextmanager
def hard_limit(nbytes: int | None) -> Iterator[None]:
    """Install the meter and hold `current_nbytes` to `nbytes` inside; restore the former limit afterwards.

    The limit is absolute: bytes in use on entry count. It holds for the process, in every thread.
    """
    install()
    former = limit_nbytes()
    set_limit(nbytes)
    try:
        yield
    finally:
        set_limit(former)


def _installed() -> ctypes.CDLL:
    if _library is None:
        raise ChunkcError(
            "the CPU memory meter is not installed: call chunkc.runtime.device.cpu_allocator.install() first"
        )
    return _library


def _build() -> str:
    """Compile the extension unless torch's cache has it; return the path of the shared library."""
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler.split()[0]) is None:
        raise UnsupportedError(
            f"limiting CPU memory needs a C++ compiler and {compiler!r} is not on PATH: install g++ or "
            "clang++, or name one in the environment variable CXX"
        )
    # torch's cache is keyed by name, and the C++ interface may differ between versions of torch.
    name = "chunkc_cpu_allocator_" + re.sub(r"\W", "_", torch.__version__)
    name += f"_py{sys.version_info.major}{sys.version_info.minor}"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()) / name
    with _ninja_on_path():
        try:
            with _only_builder(folder):
                return cpp_extension.load(
                    name=name,
                    sources=[str(_SOURCE)],
                    extra_cflags=["-O2"],
                    build_directory=str(folder),
                    with_cuda=False,
                    is_python_module=False,
                )
        except (RuntimeError, OSError) as error:
            raise UnsupportedError(
                f"the extension that limits CPU memory did not build with {compiler!r}; the compiler's "
                "output is in the error above this one"
            ) from error


@contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """Wait until no other process builds in the folder.

    torch's own lock is a file that a process which was killed leaves behind, and for which all later ones wait for
    ever. The kernel's lock ends with its process: under it, torch's file is a dead process's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "chunkc.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Put this Python environment's ninja on PATH, which lacks it where the environment is not activated."""
    if shutil.which("ninja") is not None:
        yield
        return
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja", path=scripts) is None:
        raise UnsupportedError(
            "limiting CPU memory builds a small C++ extension, which needs ninja: run `pip install ninja`"
        )
    former = os.environ["PATH"]
    os.environ["PATH"] = os.pathsep.join((scripts, former))
    try:
        yield
    finally:
        os.environ["PATH"] = former


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give the extension's functions their C types."""
    library.chunkc_meter_install.restype = ctypes.c_int
    for name in ("current", "peak", "lap_peak", "limit"):
        getattr(library, f"chunkc_meter_{name}").restype = ctypes.c_int64
    library.chunkc_meter_reset_peak.restype = None
    library.chunkc_meter_set_limit.restype = None
    library.chunkc_meter_set_limit.argtypes = [ctypes.c_int64]
    return library
