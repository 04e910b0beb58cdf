"""A model captured on this machine, as a CUDA device would train it: for plans of hardware that is not there."""

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
    """What `capture` returns, with attention taken apart if the hardware's device has no kernel for some of it.

    PyTorch takes it apart before it traces, so the model is captured once more. Where the device has a kernel for other
    attention of the same model, that is taken apart, too: more is counted than is taken then.

    Raises:
        PartlyCapturedError: `capture` does.
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
    """The graph as it runs on the hardware's device; as it is, where that is a CPU.

    What Inductor generates for a CUDA device cannot be had without one, so for `codegen="inductor"` the operators stay
    the CPU's too, and only parameters, gradients and states are rounded as the device's allocator rounds them.
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
    """Bytes that the hardware's allocator takes for storages."""
    return tuple(rounded_nbytes(n) for n in storage_nbytes) if hardware.kind == "cuda" else tuple(storage_nbytes)


def overhead_on(hardware: Hardware) -> int:
    """Bytes inside the budget that stay on the device whatever is planned: cuBLAS's workspaces, the optimizer's tables.

    A device whose capability is not known counts as a recent one, whose workspaces are larger.
    """
    if hardware.kind != "cuda":
        return 0
    return default_workspaces_nbytes(hardware.capability or _RECENT) + rounded_nbytes(TABLES_NBYTES)


def _rounded(specs: Iterable[ParamSpec]) -> tuple[ParamSpec, ...]:
    return tuple(replace(spec, granule_nbytes=GRANULE_NBYTES) for spec in specs)
