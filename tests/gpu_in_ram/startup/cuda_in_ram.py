"""The GPU made of RAM, from inside a process that runs on it: what it does from now on, and what it has done.

    with cuda_in_ram.choose(late=7, pinnable=1 << 30):   # names: `struct settings` in `device/device.h`
        ...

`capability`, `devices`, `memory` and attributes are asked once per process by torch: they are chosen at its start, see
`run.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

LAUNCH_FAILURE = 719  # cudaErrorLaunchFailure

_library = ctypes.CDLL(None)


def is_here() -> bool:
    """Whether this process runs on the GPU made of RAM."""
    return hasattr(_library, "cuda_in_ram_configure")


def has_arithmetic() -> bool:
    """Whether its kernels compute. Without, memory is the same and every kernel does nothing."""
    return is_here() and os.environ.get("CUDA_IN_RAM_ARITHMETIC") == "1"


def setting(name: str) -> int:
    """What a choice is now; of a countdown what is left."""
    ask = _library.cuda_in_ram_setting
    ask.restype, ask.argtypes = ctypes.c_long, [ctypes.c_char_p]
    return ask(_device_name(name).encode())


def _device_name(name: str) -> str:
    """The device's own name of a choice: `attribute.88` for `attribute_88`, which Python can have as a keyword."""
    return name.replace("attribute_", "attribute.")


def configure(**choices: int) -> None:
    """Choose, once the device is idle.

    Raises:
        ValueError: there is no such choice.
    """
    _library.cudaDeviceSynchronize()
    configure_now(**choices)


def configure_now(**choices: int) -> None:
    """Choose while work is under way: never `late`.

    Raises:
        ValueError: there is no such choice.
    """
    text = ",".join(f"{_device_name(name)}={value}" for name, value in choices.items())
    if _library.cuda_in_ram_configure(text.encode()):
        raise ValueError(f"no such choice: {text}")


@contextlib.contextmanager
def choose(**choices: int) -> Iterator[None]:
    """Choose for the block; what was chosen before comes back."""
    before = {name: setting(name) for name in choices}
    configure(**choices)
    try:
        yield
    finally:
        configure(**before)


def num_waits() -> int:
    """Waits of one stream for another's event so far, on late streams."""
    count = _library.cuda_in_ram_count
    count.restype = ctypes.c_long
    return count(b"waits")


def num_launches() -> int:
    """Kernels launched so far."""
    count = _library.cuda_in_ram_launches
    count.restype = ctypes.c_long
    return count()


def num_broken_captures() -> int:
    """Calls so far that ended a graph's capture by another thread (`capturing`)."""
    count = _library.cuda_in_ram_broken_captures
    count.restype = ctypes.c_long
    return count()


def break_device(error: int = LAUNCH_FAILURE) -> None:
    """Let every call fail from now on, as after a kernel's fault; 0 mends the device."""
    _library.cuda_in_ram_break(error)


_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_waiting: dict[int, Callable[[], None]] = {}
_numbers = iter(range(1, 1 << 62))


@_RUN
def _run(number: int) -> None:
    _waiting.pop(number)()


def enqueue(stream: int, work: Callable[[], None]) -> None:
    """Run `work` in a kernel's place, on a stream of that handle. It may not use CUDA, nor raise."""
    if setting("late") == 0:
        work()
        return
    number = next(_numbers)
    _waiting[number] = work
    _library.cuda_in_ram_enqueue(ctypes.c_void_p(stream), _run, ctypes.c_void_p(number))
