"""Bytes over the moments of a segment that Inductor compiles, known before it ever runs.

The wrapper that Inductor generated is a straight-line program that allocates, reuses and deletes buffers explicitly, so
it is replayed on fake tensors with the kernels left out, and the storages that come and go are counted. With dynamic
shapes the fake tensors have symbolic sizes: a symbol that the wrapper reads off an input, and what it computes from
symbols, is what the input says it is, and so are the bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from chunkc.ir.errors import ChunkcError, UnsupportedError
from chunkc.ir.program import MemoryStep, SegmentMemory
from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.passes.graphs.graphs import CLONES_OF_WHOLE_STORAGES, storage_key
from chunkc.passes.graphs.shapes import AS_TRACED, Shapes
from chunkc.passes.graphs.symbols import Size, shape_env_of, size_of
from chunkc.passes.memory.inductor.wrapper_cuda import Kernel, computes_on_cuda, cuda_names
from chunkc.passes.memory.inductor.wrapper_reader import AT, DATA, ParsedWrapper, UnreadableWrapper, sizes_namespace
from chunkc.passes.memory.scratch.cpu import output_nbytes
from chunkc.passes.memory.scratch.cuda import cuda_output_nbytes
from chunkc.passes.memory.segment_memory import NO_SCRATCH, Scratch, call_scratch
from chunkc.passes.memory.segment_storages import number_storages
from chunkc.torch_private.fake import FakeTensorMode, TorchDispatchMode, enable_python_dispatcher
from chunkc.torch_private.sizes import depends_on_data
from chunkc.torch_private.wrappers import CHECKS, SAME_TENSOR

ALLOCATION = "allocation"


def inductor_memory(
    source: str,
    example_inputs: Sequence[object],
    num_threads: int,
    shapes: Shapes = AS_TRACED,
    made_by: Mapping[str, int] = MappingProxyType({}),
) -> SegmentMemory:
    """Memory of an Inductor-compiled segment, from the source of its generated wrapper.

    Bytes are what `shapes` makes of the inputs' sizes: with symbolic sizes, expressions.

    Args:
        made_by: names of buffers in the source -> which of the segment's operations makes them, as far as it is known.

    Raises:
        UnreadableWrapper: the wrapper does something this reader does not know.
        UnsupportedError: a size depends on data, or an operator does not say what it returns.
    """
    wrapper = ParsedWrapper.parse(source, made_by)
    on_cuda = computes_on_cuda(wrapper.call_source, example_inputs)
    given = shapes.of(list(example_inputs))
    shape_env = shape_env_of(given) or ShapeEnv()
    with (
        shape_env.ignore_fresh_unbacked_symbols(),
        enable_python_dispatcher(),  # some meta kernels need it where sizes are symbols
        FakeTensorMode(shape_env=shape_env) as mode,
        _StorageTracker(num_threads, on_cuda) as tracker,
    ):
        args = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=_device_type_of(t, on_cuda))
            if isinstance(t, torch.Tensor)
            else t
            for t in given
        ]
        tracker.steps.clear()
        tracker.live.clear()
        input_keys = [storage_key(t) if isinstance(t, torch.Tensor) else None for t in args]
        for index, tensor in enumerate(args):
            if isinstance(tensor, torch.Tensor):
                tracker.adopt_input(index, tensor)
            del tensor
        namespace = _wrapper_namespace(tracker)
        namespace[AT] = tracker.at
        namespace[DATA] = lambda: shape_env.create_unbacked_symint()
        namespace.update({name: Kernel(name, tracker.step) for name in wrapper.kernels})
        call = wrapper.call(namespace)
        tracker.step("start")
        outputs = [value for value in _replayed(call, args) if value is not None]
        keys = [storage_key(t) if isinstance(t, torch.Tensor) else None for t in outputs]
        size = {storage_key(t): tracker.nbytes(t) for t in outputs if isinstance(t, torch.Tensor)}
        held = [None if k in tracker.input_released else key for k, key in enumerate(input_keys)]
        numbers, storages = number_storages(keys, held, size)
        steps = tuple(tracker.steps)
        released = tuple(tracker.input_released.get(k, len(steps)) for k in range(len(input_keys)))
        del mode
    return SegmentMemory(steps, released, numbers, storages).with_sizes(lambda nbytes: _known(nbytes, shapes))


def _device_type_of(given: torch.Tensor, on_cuda: bool) -> str:
    """Return the device of a wrapper's input, whatever a fake tensor says; 0-dim ones may be on the CPU."""
    return "cuda" if on_cuda and given.dim() else given.device.type


def _replayed(call: Callable[[list[Any]], Any], args: list[Any]) -> Any:
    """Execute the wrapper's function on fake tensors, and return its result.

    Raises:
        UnreadableWrapper: it calls something otherwise than this reader expects.
    """
    try:
        return call(args)
    except (ChunkcError, UnreadableWrapper):
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        raise UnreadableWrapper(f"calls something in a new way ({type(error).__name__}: {reason})") from error


def _known(nbytes: int | torch.SymInt, shapes: Shapes) -> Size:
    """Convert a number of bytes to an int or an expression, as `shapes` keeps it.

    Raises:
        UnsupportedError: it depends on the values of tensors.
    """
    size = size_of(shapes.known(nbytes))
    if not isinstance(size, int) and depends_on_data(size):
        raise UnsupportedError(
            f"a compiled segment allocates {size} bytes, which depends on the values of tensors; "
            "chunkc plans sizes that shapes decide: compute it in a function under torch.compiler.disable"
        )
    return size


def _shape_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operator's result for fake tensors.

    Raises:
        UnsupportedError: it does not say.
    """
    try:
        return func(*args, **kwargs)
    except Exception as error:
        raise UnsupportedError(
            f"{func} does not tell the shape of its result ({type(error).__name__}: {error}); "
            'compile with options={"codegen": "eager"}, or use another formulation'
        ) from error


class _StorageTracker(TorchDispatchMode):
    """Counts the storages that operators allocate, until nothing holds them any more."""

    supports_higher_order_operators = True

    def __init__(self, num_threads: int, on_cuda: bool) -> None:
        super().__init__()
        self.num_threads = num_threads
        self.on_cuda = on_cuda
        self.live: dict[int, int | torch.SymInt] = {}
        self.steps: list[MemoryStep] = []
        self.input_released: dict[int, int] = {}
        self.position: int | None = None

    def adopt_input(self, index: int, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        weakref.finalize(tensor.untyped_storage(), self._release_input, index, key).atexit = False
        self.live[key] = 0

    def _release_input(self, index: int, key: int) -> None:
        self.input_released[index] = len(self.steps)
        del self.live[key]  # the address may serve another storage from now on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _shape_of(func, args, kwargs)
        if getattr(func, "namespace", "") == "prim":  # asks for a device or a layout
            return result
        fresh = False
        corrected = self._corrected(func, args, kwargs, result)
        for position, tensor in enumerate(pytree.tree_leaves(result)):
            if isinstance(tensor, torch.Tensor) and storage_key(tensor) not in self.live:
                key = storage_key(tensor)
                self.live[key] = corrected[position] if position in corrected else self.nbytes(tensor)
                weakref.finalize(tensor.untyped_storage(), self.live.pop, key, None).atexit = False
                fresh = True
        scratch = self.scratch(func, args, kwargs, result)
        if fresh or scratch != NO_SCRATCH:
            allocation = func is torch.ops.aten.empty_strided.default
            self.step(ALLOCATION if allocation else op_name_of(func), scratch)
        return result

    def at(self, position: int | None) -> None:
        """Attribute what follows to the segment's operation of that position."""
        self.position = position

    def nbytes(self, tensor: torch.Tensor) -> int | torch.SymInt:
        """Return the bytes that the tensor's storage takes on the device where the segment runs."""
        nbytes = tensor.untyped_storage().nbytes()
        if self.on_cuda:
            return rounded_nbytes(nbytes) if tensor.device.type == "cuda" else 0
        return nbytes

    def _corrected(
        self, func: Any, args: tuple, kwargs: dict[str, Any], result: object
    ) -> dict[int, int] | dict[int, int | torch.SymInt]:
        """Map positions of returned tensors to bytes of their storages, where these differ from the fake tensors'."""
        if func in CLONES_OF_WHOLE_STORAGES:
            return {0: self.nbytes(args[0])}
        if not isinstance(func, torch._ops.OpOverload):
            return {}
        return (cuda_output_nbytes if self.on_cuda else output_nbytes)(func, args, kwargs, result)

    def scratch(self, func: Any, args: tuple, kwargs: dict[str, Any], result: object) -> Scratch:
        return call_scratch(func, args, kwargs, result, self.num_threads, on_cuda=self.on_cuda)

    def step(self, label: str, scratch: Scratch = NO_SCRATCH) -> None:
        """Note a moment. Allocations before a kernel are the kernel's."""
        if label != ALLOCATION:
            for index in reversed(range(len(self.steps))):
                if self.steps[index].op != ALLOCATION:
                    break
                self.steps[index] = MemoryStep(label, "", self.steps[index].nbytes, self.position)
        nbytes = torch.sym_sum([*self.live.values(), scratch.nbytes])
        self.steps.append(MemoryStep(label, "", nbytes, self.position, scratch.estimate))


def op_name_of(func: Any) -> str:
    if isinstance(func, torch._ops.HigherOrderOperator):
        return func.name()
    return func._schema.name.replace("::", ".")


class _ExternKernels:
    """Stands for Inductor's `extern_kernels`: with `out=` nothing is allocated but scratch."""

    def __init__(self, tracker: _StorageTracker) -> None:
        self._tracker = tracker

    def __getattr__(self, name: str) -> Callable[..., Any]:
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            raise UnreadableWrapper(f"calls extern_kernels.{name}")

        def call(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
            if out is None:
                return packet(*args, **kwargs)
            scratch = self._tracker.scratch(packet.default, args, kwargs, out)
            self._tracker.step(f"aten.{name}", scratch)
            return out

        return call


def _wrapper_namespace(tracker: _StorageTracker) -> dict[str, Any]:
    def empty_strided_cpu(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")

    def reinterpret_tensor(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def itself(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "device": torch.device,
        **sizes_namespace(),
        "empty_strided_cpu": empty_strided_cpu,
        "reinterpret_tensor": reinterpret_tensor,
        "extern_kernels": _ExternKernels(tracker),
        **dict.fromkeys(CHECKS, nothing),
        **dict.fromkeys(SAME_TENSOR, itself),
        "inductor_ops": torch.ops.inductor,
        **(cuda_names() if tracker.on_cuda else {}),
    }
