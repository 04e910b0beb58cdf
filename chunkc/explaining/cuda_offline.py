"""Adapt a model captured on the CPU to a CUDA device that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch.nn.attention import SDPBackend, sdpa_kernel

from chunkc.explaining.offline import OfflineGraph, OfflineStep, PartlyCapturedError
from chunkc.ir.hardware import Hardware
from chunkc.ir.layout import ParamSpec
from chunkc.machines.devices import TABLES_NBYTES
from chunkc.passes.graphs.cuda_memory import GRANULE_NBYTES, default_workspaces_nbytes, rounded_nbytes
from chunkc.passes.rewrite.retarget_cuda import has_attention_without_kernel, on_cuda

_RECENT = (9, 0)


def captured_for(hardware: Hardware, capture: Callable[[], OfflineStep]) -> OfflineStep:
    """Capture a step, with attention decomposed if the hardware's device has no kernel for some of it.

    PyTorch decomposes it before it traces, so the model is captured once more. If the device has a kernel for other
    attention of the same model, that is decomposed too, and more bytes are counted than will be taken.

    Raises:
        PartlyCapturedError: raised by `capture`.
    """
    failure = None
    try:
        step = capture()
    except PartlyCapturedError as error:
        step, failure = error.before, error
    if hardware.kind == "cuda" and any(
        has_attention_without_kernel(graph.capture.forward, hardware.capability)
        for graph in step.graphs
        if graph.capture.forward is not None
    ):
        with sdpa_kernel(SDPBackend.MATH):
            return capture()
    if failure is not None:
        raise failure
    return step


def planned_on(graph: OfflineGraph, hardware: Hardware, codegen: str) -> OfflineGraph:
    """Return the graph as it runs on the hardware's device; unchanged if that is a CPU.

    Inductor generates no code for a CUDA device without one, so for `codegen="inductor"` the operators stay the CPU's,
    and only parameters, gradients and states are rounded as the device's allocator rounds them.
    """
    if hardware.kind != "cuda":
        return graph
    capture = graph.capture
    if codegen == "eager":
        assert capture.forward is not None
        forward, backward = on_cuda(capture.forward, capture.backward, hardware.capability)
        capture = replace(capture, forward=forward, backward=backward)
    return replace(graph, capture=capture, movable=_rounded(graph.movable), fixed=_rounded(graph.fixed))


def storages_on(storage_nbytes: Iterable[int], hardware: Hardware) -> tuple[int, ...]:
    """Return the bytes that the hardware's allocator takes for storages."""
    return tuple(rounded_nbytes(n) for n in storage_nbytes) if hardware.kind == "cuda" else tuple(storage_nbytes)


def overhead_on(hardware: Hardware) -> int:
    """Return the bytes of the budget that no plan moves: cuBLAS's workspaces and the optimizer's tables.

    A device of unknown capability counts as a recent one, which has larger workspaces.
    """
    if hardware.kind != "cuda":
        return 0
    return default_workspaces_nbytes(hardware.capability or _RECENT) + rounded_nbytes(TABLES_NBYTES)


def _rounded(specs: Iterable[ParamSpec]) -> tuple[ParamSpec, ...]:
    return tuple(replace(spec, granule_nbytes=GRANULE_NBYTES) for spec in specs)
