"""The device's own rules for streams, as docs/cuda.md names them, without chunkc. No arithmetic: copies and fills are
the device's own.

A gate that is shut stands for work that takes long: what waits for it has not happened until it is opened.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cuda_in_ram
import pytest
import torch
from device_gate import Gate

if not cuda_in_ram.is_here():
    pytest.skip("not on the GPU made of RAM: make test-cuda", allow_module_level=True)

NBYTES = 1 << 12
LEGACY, PER_THREAD = 1, 2  # CUDA's own handles
BLOCKING, NON_BLOCKING = 0, 1
NOT_READY = 600
AT_MOST_S = 20.0

cuda = ctypes.CDLL(None)
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def call(name: str, *arguments: object) -> None:
    error = getattr(cuda, name)(*arguments)
    assert error == 0, f"{name}: error {error}"


@pytest.fixture(autouse=True)
def late() -> Iterator[None]:
    torch.cuda.init()
    with cuda_in_ram.choose(late=1, late_us=0):
        yield
    cuda.cudaGetLastError()  # a call that was refused leaves its error for torch to find


class Stream:
    def __init__(self, flags: int = NON_BLOCKING) -> None:
        self.handle = ctypes.c_void_p()
        call("cudaStreamCreateWithFlags", ctypes.byref(self.handle), flags)

    @property
    def cuda_stream(self) -> int:
        return self.handle.value or 0

    def is_done(self) -> bool:
        error = cuda.cudaStreamQuery(self.handle)
        assert error in (0, NOT_READY)
        return error == 0

    def is_held_back(self) -> bool:
        """It had time enough for what it was given, and has not done it."""
        time.sleep(0.05)
        return not self.is_done()

    def finish(self) -> None:
        call("cudaStreamSynchronize", self.handle)


class Default(Stream):
    def __init__(self, handle: int) -> None:
        self.handle = ctypes.c_void_p(handle)


class Bytes:
    """Memory of one kind, zeros at first."""

    def __init__(self, address: int) -> None:
        self.address = ctypes.c_void_p(address)
        ctypes.memset(self.address, 0, NBYTES)

    def first(self) -> int:
        """Read past all streams."""
        return ctypes.string_at(self.address, 1)[0]

    def set_now(self, value: int) -> None:
        """Written past all streams."""
        ctypes.memset(self.address, value, NBYTES)

    def fill(self, value: int, stream: Stream) -> None:
        call("cudaMemsetAsync", self.address, value, ctypes.c_size_t(NBYTES), stream.handle)

    def copy_to(self, other: Bytes, stream: Stream) -> None:
        call("cudaMemcpyAsync", other.address, self.address, ctypes.c_size_t(NBYTES), 4, stream.handle)


def on_device() -> Bytes:
    address = ctypes.c_void_p()
    call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(NBYTES))
    return Bytes(address.value or 0)


def pinned() -> Bytes:
    address = ctypes.c_void_p()
    call("cudaMallocHost", ctypes.byref(address), ctypes.c_size_t(NBYTES))
    return Bytes(address.value or 0)


def pageable() -> Bytes:
    found = Bytes(ctypes.addressof(room := ctypes.create_string_buffer(NBYTES)))
    found.room = room  # type: ignore[attr-defined]
    return found


def free_nbytes() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return free.value


def new_event() -> ctypes.c_void_p:
    event = ctypes.c_void_p()
    call("cudaEventCreateWithFlags", ctypes.byref(event), 2)
    return event


def test_work_of_a_stream_is_in_order_and_that_of_others_is_not() -> None:
    one, other, x, y = Stream(), Stream(), on_device(), on_device()
    gate = Gate(one)
    x.fill(1, one)
    x.fill(2, one)
    y.fill(3, other)
    other.finish()
    assert (x.first(), y.first()) == (0, 3)
    assert one.is_held_back()
    gate.open()
    one.finish()
    assert x.first() == 2
    assert one.is_done()


def test_a_host_callback_comes_in_stream_order() -> None:
    stream, x, seen = Stream(), on_device(), []
    see = HOST_FUNCTION(lambda argument: seen.append((argument, x.first())))
    gate = Gate(stream)
    x.fill(1, stream)
    call("cudaLaunchHostFunc", stream.handle, see, ctypes.c_void_p(7))
    x.fill(2, stream)
    assert stream.is_held_back()
    assert seen == []
    gate.open()
    stream.finish()
    assert seen == [(7, 1)]
    assert x.first() == 2


def test_a_stream_waits_for_an_event() -> None:
    one, other, x, y, event = Stream(), Stream(), on_device(), on_device(), new_event()
    gate = Gate(one)
    x.fill(1, one)
    call("cudaEventRecord", event, one.handle)
    call("cudaStreamWaitEvent", other.handle, event, 0)
    x.copy_to(y, other)
    assert cuda.cudaEventQuery(event) == NOT_READY
    assert other.is_held_back()
    gate.open()
    other.finish()
    assert y.first() == 1
    assert cuda.cudaEventQuery(event) == 0


def test_it_waits_for_what_was_recorded_by_then() -> None:
    """An event that is recorded again later, or never was, holds nobody back."""
    one, other, event = Stream(), Stream(), new_event()
    call("cudaStreamWaitEvent", other.handle, event, 0)
    call("cudaEventRecord", event, one.handle)
    call("cudaStreamWaitEvent", other.handle, event, 0)
    gate = Gate(one)
    call("cudaEventRecord", event, one.handle)
    other.finish()
    assert cuda.cudaEventQuery(event) == NOT_READY
    gate.open_soon()
    call("cudaEventSynchronize", event)
    assert gate.is_open()


@pytest.mark.parametrize("handle", [0, LEGACY], ids=["null", "legacy"])
def test_the_legacy_stream_and_blocking_streams_wait_for_each_other(handle: int) -> None:
    blocking, default, x, y = Stream(BLOCKING), Default(handle), on_device(), on_device()
    gate = Gate(blocking)
    x.fill(1, blocking)
    x.copy_to(y, default)
    assert default.is_held_back()
    gate.open()
    default.finish()
    assert y.first() == 1
    gate = Gate(default)
    x.fill(2, default)
    x.copy_to(y, blocking)
    assert blocking.is_held_back()
    gate.open()
    blocking.finish()
    assert y.first() == 2


def test_the_legacy_stream_and_others_do_not() -> None:
    other, default, x = Stream(NON_BLOCKING), Default(LEGACY), on_device()
    gate = Gate(other)
    x.fill(1, default)
    default.finish()
    assert x.first() == 1
    gate.open()
    other.finish()
    gate = Gate(default)
    x.fill(2, other)
    other.finish()
    assert x.first() == 2
    gate.open()
    default.finish()


def test_each_thread_has_a_default_stream_of_its_own_which_waits_for_the_legacy_one() -> None:
    mine, legacy, x = Default(PER_THREAD), Default(LEGACY), on_device()

    def in_another_thread(work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(AT_MOST_S)
        assert not thread.is_alive()

    def fill() -> None:
        x.fill(1, mine)
        mine.finish()

    gate = Gate(mine)
    in_another_thread(fill)
    assert x.first() == 1
    x.fill(2, legacy)
    assert legacy.is_held_back()
    gate.open()
    legacy.finish()
    assert x.first() == 2


def test_pinned_memory_is_read_when_the_stream_is_that_far_and_pageable_memory_at_the_call() -> None:
    stream, sources = Stream(), (pinned(), pageable())
    found = [on_device(), on_device()]
    for source in sources:
        source.set_now(1)
    gate = Gate(stream)
    for source, target in zip(sources, found, strict=True):
        source.copy_to(target, stream)
        source.set_now(2)
    assert stream.is_held_back()
    assert [x.first() for x in found] == [0, 0]
    gate.open()
    stream.finish()
    assert [x.first() for x in found] == [2, 1]


def test_pageable_memory_is_written_before_the_call_returns_and_pinned_memory_is_not() -> None:
    stream, x, late, at_once = Stream(), on_device(), pinned(), pageable()
    x.set_now(1)
    gate = Gate(stream)
    x.copy_to(late, stream)
    assert stream.is_held_back()
    assert late.first() == 0
    gate.open_soon()
    x.copy_to(at_once, stream)
    assert gate.is_open()
    assert (late.first(), at_once.first()) == (1, 1)


INVALID_VALUE = 1
MEMORY: dict[str, Callable[[], Bytes]] = {"device": on_device, "pinned": pinned, "pageable": pageable}
HOST, DEVICE = {"pinned", "pageable"}, {"device", "pinned"}
KINDS = [(HOST, HOST), (HOST, DEVICE), (DEVICE, HOST), (DEVICE, DEVICE)]
"""Of cudaMemcpyKind, in its order: which memory a copy may be from, and to. Host memory that is registered has one
address for both sides."""


def copy_errors(source: str, target: str) -> list[int]:
    """Of a copy between two kinds of memory under each cudaMemcpyKind, by each call that takes one."""
    x, y, stream = MEMORY[source](), MEMORY[target](), Stream()
    one, nbytes, found = ctypes.c_size_t(1), ctypes.c_size_t(NBYTES), []
    for kind in range(len(KINDS)):
        errors = {
            cuda.cudaMemcpy(y.address, x.address, nbytes, kind),
            cuda.cudaMemcpyAsync(y.address, x.address, nbytes, kind, stream.handle),
            cuda.cudaMemcpy2DAsync(y.address, one, x.address, one, one, one, kind, stream.handle),
        }
        (error,) = errors
        found.append(error)
    x.copy_to(y, stream)  # whose kind is to be inferred
    stream.finish()
    return found


@pytest.mark.parametrize("target", MEMORY)
@pytest.mark.parametrize("source", MEMORY)
def test_a_copy_is_refused_whose_addresses_are_not_of_its_kind(source: str, target: str) -> None:
    wanted = [0 if source in begins and target in ends else INVALID_VALUE for begins, ends in KINDS]
    assert copy_errors(source, target) == wanted


def test_pageable_memory_is_the_devices_too_where_its_driver_says_so() -> None:
    assert copy_errors("pageable", "pageable") == [0, INVALID_VALUE, INVALID_VALUE, INVALID_VALUE]
    with cuda_in_ram.choose(attribute_88=1):
        assert copy_errors("pageable", "pageable") == [0, 0, 0, 0]
        assert copy_errors("device", "pageable") == [INVALID_VALUE, INVALID_VALUE, 0, 0]


def test_pinned_memory_is_not_where_the_device_has_addresses_of_its_own() -> None:
    with cuda_in_ram.choose(attribute_91=0):
        assert copy_errors("pinned", "device") == [INVALID_VALUE, 0, INVALID_VALUE, INVALID_VALUE]


def test_only_what_the_device_can_use_is_filled() -> None:
    size = ctypes.c_size_t(NBYTES)
    found = {name: cuda.cudaMemset(make().address, 1, size) for name, make in MEMORY.items()}
    assert found == {"device": 0, "pinned": 0, "pageable": INVALID_VALUE}
    with cuda_in_ram.choose(attribute_88=1):
        assert cuda.cudaMemset(pageable().address, 1, size) == 0


def test_a_free_in_a_stream_comes_in_its_order() -> None:
    stream, other, y = Stream(), Stream(), on_device()
    address, before = ctypes.c_void_p(), free_nbytes()
    call("cudaMallocAsync", ctypes.byref(address), ctypes.c_size_t(NBYTES), stream.handle)
    x = Bytes(address.value or 0)
    gate = Gate(stream)
    x.fill(1, stream)
    x.copy_to(y, stream)
    call("cudaFreeAsync", address, stream.handle)
    other.finish()
    assert stream.is_held_back()
    assert free_nbytes() == before - NBYTES, "the stream is not that far"
    gate.open()
    stream.finish()
    assert free_nbytes() == before
    assert y.first() == 1


@pytest.mark.parametrize(("make", "free"), [(on_device, "cudaFree"), (pinned, "cudaFreeHost")], ids=["device", "host"])
def test_a_free_in_no_stream_waits_for_the_device(make: Callable[[], Bytes], free: str) -> None:
    stream, x = Stream(), make()
    gate = Gate(stream)
    gate.open_soon()
    call(free, x.address)
    assert gate.is_open()
    stream.finish()


def test_unregistering_waits_for_nothing() -> None:
    stream, page = Stream(), 4096
    room = ctypes.create_string_buffer(3 * page)
    address = ctypes.c_void_p((ctypes.addressof(room) + page - 1) // page * page)
    call("cudaHostRegister", address, ctypes.c_size_t(page), 0)
    gate = Gate(stream)
    call("cudaHostUnregister", address)
    assert stream.is_held_back()
    gate.open()
    stream.finish()


def test_a_wait_that_is_left_out_holds_nobody_back() -> None:
    one, other, x, y, event = Stream(), Stream(), on_device(), on_device(), new_event()
    x.set_now(1)
    gate = Gate(one)
    x.fill(2, one)
    call("cudaEventRecord", event, one.handle)
    cuda_in_ram.configure_now(drop_wait=1)
    call("cudaStreamWaitEvent", other.handle, event, 0)
    x.copy_to(y, other)
    other.finish()
    assert y.first() == 1
    gate.open()
    one.finish()


def test_a_call_that_is_not_there_says_so_and_fails() -> None:
    script = "import ctypes; print(ctypes.CDLL(None).cudaGraphLaunch(None, None))"
    run = Path(__file__).parent / "run.py"
    command = [sys.executable, str(run), sys.executable, "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=AT_MOST_S)
    assert found.stdout.split() == ["801"]
    assert "cudaGraphLaunch is not there" in found.stderr
