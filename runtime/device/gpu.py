"""Wrap the few CUDA calls that chunkc makes, so that all logic above them runs without a GPU.

`runtime.device.cuda`, `runtime.storage.pinned` and `runtime.storage.staging` use the protocol `Gpu`; `TorchGpu`
implements it by torch's CUDA and nothing else. Streams and events are torch's own objects, or have the same methods:
`stream.wait_event(event)`, `stream.synchronize()`, `event.record(stream)`, `event.query()`, `event.synchronize()`,
`event.elapsed_time(later)` in milliseconds. As in CUDA, to wait for an event that was never recorded is not to wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils import dlpack

from chunkc.ir.errors import UnsupportedError
from chunkc.runtime.device.numa import node_of
from chunkc.torch_private import cuda_allocator

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
_PAGEABLE_MEMORY_ACCESS = 88  # CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS
_CAN_USE_HOST_POINTER = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
DLPACK_CUDA = 2  # kDLCUDA

_capsule_address = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_address.restype, _capsule_address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def has_kernels_for(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Whether a build of torch runs on a device: by machine code of its generation that is no newer, or by PTX.

    Args:
        built_for: as `torch.cuda.get_arch_list()` says, such as `["sm_80", "compute_90"]`. Entries that name no compute
            capability, as on AMD's devices, refuse nothing.
    """
    matches = [re.fullmatch(r"(sm|compute)_([0-9]+)([0-9])[af]?", name) for name in built_for]
    targets = [(match[1], (int(match[2]), int(match[3]))) for match in matches if match is not None]
    return not targets or any(
        built <= capability and (kind == "compute" or built[0] == capability[0]) for kind, built in targets
    )


class Gpu(Protocol):
    """CUDA device, with its streams, events, copies and pinned host memory."""

    @property
    def device(self) -> torch.device: ...

    def new_stream(self) -> Any:
        """Make a stream that waits for no other by itself."""

    def current_stream(self) -> Any:
        """Return the calling thread's stream, on which eager code computes."""

    def using(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make `stream` the calling thread's current one."""

    def new_event(self, *, timed: bool = False) -> Any: ...

    def synchronize(self) -> None:
        """Block the host until the device has done all enqueued work, on every stream."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device on the current stream. Returns at once if the host's memory is pinned."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a flat, uninitialised tensor on the current stream."""

    def pin(self, address: int, nbytes: int) -> str | None:
        """Page-lock host memory and map it for the device; return why it could not be done, or None."""

    def unpin(self, address: int) -> str | None:
        """Undo `pin`, after the work of every stream noted by `note_current_stream` and every stream of chunkc's.

        Breaks no graph that another thread captures.

        Returns:
            Why it could not be done, or None.
        """

    def note_current_stream(self) -> None:
        """Let `unpin` wait for the calling thread's stream, too. Calls nothing of CUDA: safe in a finalizer."""

    def view(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        """Make a flat uint8 tensor on the device over pinned host memory; its storage keeps `owner` alive.

        Raises:
            UnsupportedError: this device cannot address that memory.
        """

    def cannot_view_pageable(self) -> str | None:
        """Say why `view_pageable` is impossible, and what would make it possible; None if it is possible."""

    def view_pageable(self, host: torch.UntypedStorage) -> torch.Tensor:
        """Make a flat uint8 tensor on the device over unpinned host memory; its storage keeps `host` alive."""

    def numa_node(self) -> int | None:
        """Return the NUMA node of host memory nearest to the device; None where the system does not say."""

    def lap_peak_nbytes(self) -> int:
        """Read the peak of allocated bytes since the last call."""

    def num_retries(self) -> int:
        """Count how often the allocator has released its cached blocks to retry an allocation."""


def driver_attribute(index: int, attribute: int) -> int | None:
    """Read a device's attribute from the driver, by its number in `CUdevice_attribute`; None where it has none."""
    torch.cuda.init()
    value, handle = ctypes.c_int(0), ctypes.c_int(0)
    driver = _driver()
    if driver is None:
        return None
    failed = driver.cuDeviceGet(ctypes.byref(handle), index)
    failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
    return None if failed else value.value


class _HostMemory:
    """Host memory as an argument of `torch.as_tensor`, by the CUDA array interface (version 3)."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def relabelled(host: torch.UntypedStorage, device_type: int, index: int) -> torch.Tensor:
    """Relabel a CPU storage's bytes, by DLPack, as a flat uint8 tensor on another device.

    Args:
        device_type: in DLPack's numbers.
    """
    capsule = dlpack.to_dlpack(torch.empty(0, dtype=torch.uint8, device="cpu").set_(host))
    # A DLManagedTensor begins with its DLTensor, and that with the address and the device's type and index.
    address = _capsule_address(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    (ctypes.c_int32 * 2).from_address(address)[:] = [device_type, index]
    return dlpack.from_dlpack(capsule)


_streams: defaultdict[int, dict[int, torch.cuda.Stream]] = defaultdict(dict)
"""Each device's streams by handle: chunkc's own, and foreign ones that were a thread's current stream under chunkc."""

_spare_streams: defaultdict[int, deque[int]] = defaultdict(deque)
"""Each device's handles of chunkc's own streams that no link uses any more. Finalizers append, in any thread."""


class _OwnStream(torch.cuda.ExternalStream):
    """A stream that gives its handle back when it is gone.

    Not by a weak reference: PyTorch 2.11 frees a stream without telling those, which then point at freed memory.
    """

    spares: deque[int]

    def __del__(self) -> None:
        self.spares.append(self.cuda_stream)


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """Load NVIDIA's driver, if there is one."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _call(driver: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        UnsupportedError: it returns an error.
    """
    error = getattr(driver, name)(*arguments)
    if error:
        raise UnsupportedError(f"{name} of the CUDA driver failed with error {error}")


@contextlib.contextmanager
def _relaxed_capture_mode() -> Iterator[None]:
    """Allow the calling thread calls that cannot be captured, while another thread captures a graph."""
    driver, mode = _driver(), ctypes.c_int(_RELAXED)
    if driver is None:
        yield
        return
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class TorchGpu:
    """CUDA device through torch. Needs torch 2.9 or newer for `view`.

    Streams are not from torch's pool of 32, which it hands out in turn: a link would soon be on a user's stream, or on
    another link's, and wait for unrelated work. Streams of links that are gone are reused by later links.

    Args:
        index: the device's; by default that of the current device.

    Raises:
        UnsupportedError: there is no such device, or this torch has no kernels for it.
    """

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError("there is no CUDA device that this torch can use")
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        capability, built_for = torch.cuda.get_device_capability(self.device), torch.cuda.get_arch_list()
        if not has_kernels_for(capability, built_for):
            raise UnsupportedError(
                f"{torch.cuda.get_device_name(self.device)} has compute capability {capability[0]}.{capability[1]}, "
                f"and PyTorch {torch.__version__} no kernels for it (but for {', '.join(built_for)}): install a build "
                "of PyTorch for an older CUDA (those for CUDA 13 begin at 7.5; those for CUDA 12.6 have Volta's 7.0), "
                "or train on the CPU"
            )

    def new_stream(self) -> torch.cuda.Stream:
        handle: int | None
        try:
            handle = _spare_streams[self.device.index].pop()
        except IndexError:
            handle = self._make_stream()
        if handle is None:  # not NVIDIA's driver
            return torch.cuda.Stream(self.device)
        stream = _OwnStream(handle, self.device)
        stream.spares = _spare_streams[self.device.index]
        _streams[self.device.index][handle] = torch.cuda.ExternalStream(handle, self.device)
        return stream

    def _make_stream(self) -> int | None:
        """Make a stream by the driver that waits for no other, and is never destroyed; None without NVIDIA's driver."""
        driver = _driver()
        if driver is None:
            return None
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(self.device):
            torch.cuda.init()
            _call(driver, "cuDeviceGet", ctypes.byref(device), self.device.index)
            _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            _call(driver, "cuCtxPushCurrent_v2", context)
            try:
                _call(driver, "cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
            finally:
                _call(driver, "cuCtxPopCurrent_v2", ctypes.byref(context))
                _call(driver, "cuDevicePrimaryCtxRelease_v2", device)
        return stream.value

    def current_stream(self) -> torch.cuda.Stream:
        self.note_current_stream()
        return torch.cuda.current_stream(self.device)

    def note_current_stream(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        if stream.stream_id != stream.cuda_stream or stream.stream_id == 0:  # foreign: its owner may destroy it
            _streams[self.device.index].setdefault(stream.cuda_stream, stream)

    def using(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def new_event(self, *, timed: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timed, blocking=True)  # a thread that waits takes no core

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source, non_blocking=True)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def pin(self, address: int, nbytes: int) -> str | None:
        with torch.cuda.device(self.device):
            problem = _problem(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE_AND_MAPPED))
            if problem is not None:
                self._forget_last_error()
        return problem

    def unpin(self, address: int) -> str | None:
        with torch.cuda.device(self.device), _relaxed_capture_mode():
            problem = self._await_streams()
            problem = _problem(torch.cuda.cudart().cudaHostUnregister(address)) or problem
            if problem is not None:
                self._forget_last_error()
        return problem

    def _await_streams(self) -> str | None:
        """Block until the streams noted so far have done their work; return the error, or None.

        Does not wait for the whole device: that is an error while any stream captures a graph, and breaks the graph.
        """
        for stream in list(_streams[self.device.index].values()):
            with torch.cuda.stream(stream):
                if torch.cuda.is_current_stream_capturing():
                    continue  # it had to be idle before the capture
            try:
                end = self.new_event()
                end.record(stream)
                end.synchronize()
            except RuntimeError as error:  # an earlier kernel's: no call succeeds any more
                return str(error).splitlines()[0]
        return None

    def view(self, address: int, nbytes: int, owner: object) -> torch.Tensor:
        flat = torch.as_tensor(_HostMemory(address, nbytes, owner), device=self.device)
        if flat.data_ptr() != address:  # torch copied: it took the memory for another device's
            raise UnsupportedError(
                f"{self.device} cannot address pinned host memory in place; make it the only device that the process "
                "sees (CUDA_VISIBLE_DEVICES), or train on the CPU"
            )
        if not self._driver_says(_CAN_USE_HOST_POINTER):
            raise UnsupportedError(
                f"{self.device} has addresses of its own for pinned host memory, as its driver says "
                "(under Windows' WSL, for one): train on Linux itself, or on the CPU"
            )
        return flat

    def cannot_view_pageable(self) -> str | None:
        if self._driver_says(_PAGEABLE_MEMORY_ACCESS):
            return None
        return (
            "its driver does not give it pageable memory (heterogeneous memory management: a Turing card or newer, "
            "NVIDIA's open kernel modules, Linux 6.1.24 or newer; `nvidia-smi -q` then says Addressing Mode: HMM)"
        )

    def view_pageable(self, host: torch.UntypedStorage) -> torch.Tensor:
        # Not by the CUDA array interface: torch would ask the runtime for the memory's device, and it knows none.
        return relabelled(host, DLPACK_CUDA, self.device.index)

    def _driver_says(self, attribute: int) -> bool:
        """Whether the driver reports an attribute of the device, for attributes that torch has no name for."""
        return driver_attribute(self.device.index, attribute) == 1

    def numa_node(self) -> int | None:
        properties: Any = torch.cuda.get_device_properties(self.device)  # torch's types lack the bus address
        return node_of(f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0")

    def lap_peak_nbytes(self) -> int:
        return cuda_allocator.lap_peak_nbytes(self.device.index)

    def num_retries(self) -> int:
        return torch.cuda.memory_stats_as_nested_dict(self.device).get("num_alloc_retries", 0)

    def _forget_last_error(self) -> None:
        """Clear the thread's last CUDA error: a failed call leaves it for the next kernel launch to find.

        torch offers no `cudaGetLastError`; so launch a kernel, which checks, raises and clears.
        """
        with contextlib.suppress(RuntimeError):
            torch.empty(1, device=self.device).fill_(1.0)


def _problem(code: Any) -> str | None:
    """Translate a return code of the CUDA runtime into its message; None for success."""
    cudart = torch.cuda.cudart()
    return None if code == cudart.cudaError.success else str(cudart.cudaGetErrorString(code))
