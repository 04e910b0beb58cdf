"""Bytes over the moments of one segment, known before it ever runs.

For `codegen="eager"`: liveness over the storages of the segment's graph. For `codegen="inductor"`: the wrapper that
Inductor generated is a straight-line program that allocates, reuses and deletes buffers explicitly, so it is
replayed on fake tensors with the kernels left out, and the storages that come and go are counted.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from chunkc.ir.errors import UnsupportedError
from chunkc.ir.program import MemoryStep, SegmentMemory
from chunkc.passes.cuda_memory import rounded_nbytes
from chunkc.passes.graphs import (
    is_compute,
    module_path,
    op_name,
    output_node,
    placeholders,
    returned,
    storage_key,
    storage_nbytes,
)
from chunkc.passes.scratch import scratch_nbytes
from chunkc.passes.scratch_cuda import cuda_scratch_nbytes
from chunkc.passes.segment_storages import graph_storages, value_of
from chunkc.passes.wrapper_cuda import Kernel, computes_on_cuda, cuda_names

RNG_STATE_NBYTES = 5056
"""Bytes of the CPU generator's state."""


def eager_memory(graph: fx.Graph, num_threads: int) -> SegmentMemory:
    """Memory of a segment that runs node by node, every value dropped right after its last reader.

    Raises:
        UnsupportedError: an operator's memory is not known.
    """
    nodes = [node for node in graph.nodes if is_compute(node)]
    inputs = placeholders(graph)
    storages = graph_storages(graph)
    position = {node: index for index, node in enumerate(nodes)} | {output_node(graph): len(nodes)}
    last_hold: dict[int, int] = {}  # storage -> last step at which some value still holds it
    for node in [*inputs, *nodes]:
        born = position.get(node, -1)
        last_use = max((position[user] for user in node.users), default=born)
        for storage in storages.of[node]:
            last_hold[storage] = max(last_hold.get(storage, -1), last_use)
    given = [storages.of[node][0] if storages.of[node] else None for node in inputs]
    outside = {storage for storage in given if storage is not None} | storages.constants
    live: set[int] = set()
    steps = []
    for index, node in enumerate(nodes):
        live.update(storage for storage in storages.of[node] if storage not in outside)
        nbytes = sum(storages.nbytes[storage] for storage in live) + _scratch(node, num_threads)
        steps.append(MemoryStep(op_name(node), module_path(node), nbytes, index))
        live = {storage for storage in live if last_hold[storage] > index}
    released = tuple(len(nodes) if storage is None else last_hold[storage] + 1 for storage in given)
    results = [storages.of[node][0] for node in returned(graph) if node is not None]
    outputs, nbytes_of = _number_storages(results, given, dict(enumerate(storages.nbytes)))
    return SegmentMemory(tuple(steps), released, outputs, nbytes_of)


def _scratch(node: fx.Node, num_threads: int) -> int:
    """Scratch bytes of a node.

    Raises:
        UnsupportedError: they are not known.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    value = value_of(node)
    on_cuda = any(leaf.device.type == "cuda" for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    module = module_path(node)
    return call_scratch_nbytes(node.target, args, dict(kwargs), value, num_threads, module, on_cuda=on_cuda)


def call_scratch_nbytes(
    target: object,
    args: tuple,
    kwargs: dict,
    value: Any,
    num_threads: int,
    module: str = "",
    *,
    on_cuda: bool = False,
) -> int:
    """Scratch bytes of a call; of a higher-order operator's, those of the operator that it runs.

    Raises:
        UnsupportedError: they are not known.
    """
    if isinstance(target, torch._ops.OpOverload):
        if on_cuda:
            return cuda_scratch_nbytes(target, args, kwargs, value, num_threads, module)
        return scratch_nbytes(target, args, kwargs, value, num_threads, module)
    if not isinstance(target, torch._ops.HigherOrderOperator):
        return 0
    # Those of selective checkpointing keep or restore the random generator's state around an operator.
    name = target.name()
    if name == "run_and_save_rng_state":
        inner = value[1] if isinstance(value, tuple) and len(value) > 1 else value
        return call_scratch_nbytes(args[0], args[1:], kwargs, inner, num_threads, module, on_cuda=on_cuda)
    if name == "run_with_rng_state":
        inner_nbytes = call_scratch_nbytes(args[1], args[2:], kwargs, value, num_threads, module, on_cuda=on_cuda)
        return max(inner_nbytes, 0) + RNG_STATE_NBYTES
    where = f" in {module}" if module else ""
    raise UnsupportedError(
        f"chunkc does not know how much memory the higher-order operator {name}{where} takes; write that part of the "
        "model without it"
    )


def _number_storages(
    keys: Sequence[int], input_keys: Sequence[int | None], size: dict[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Storages of the outputs as `SegmentMemory.outputs` and `.storage_nbytes` count them."""
    fresh: dict[int, int] = {}
    outputs = []
    for key in keys:
        if key in input_keys:
            outputs.append(-1 - input_keys.index(key))
        else:
            outputs.append(fresh.setdefault(key, len(fresh)))
    return tuple(outputs), tuple(size[key] for key in fresh)


# --- Inductor ---------------------------------------------------------------------------------------------------


ALLOCATION = "allocation"

AT = "_chunkc_at"
"""What a marked wrapper calls before every statement."""


class _StorageTracker(TorchDispatchMode):
    """Counts the storages that operators allocate, until nothing holds them any more."""

    supports_higher_order_operators = True

    def __init__(self, num_threads: int, on_cuda: bool) -> None:
        super().__init__()
        self.num_threads = num_threads
        self.on_cuda = on_cuda
        self.live: dict[int, int] = {}
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
        result = func(*args, **kwargs)
        if getattr(func, "namespace", "") == "prim":  # asks for a device or a layout
            return result
        fresh = False
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and storage_key(tensor) not in self.live:
                key = storage_key(tensor)
                self.live[key] = self.nbytes(tensor)
                weakref.finalize(tensor.untyped_storage(), self.live.pop, key, None).atexit = False
                fresh = True
        scratch = self.scratch_nbytes(func, args, kwargs, result)
        if fresh or scratch:
            allocation = func is torch.ops.aten.empty_strided.default
            self.step(ALLOCATION if allocation else op_name_of(func), scratch)
        return result

    def at(self, position: int | None) -> None:
        """What follows is the segment's operation of that position."""
        self.position = position

    def nbytes(self, tensor: torch.Tensor) -> int:
        """Bytes of the tensor's storage where the segment will run; fake ones of CUDA wrappers are on the CPU."""
        return rounded_nbytes(storage_nbytes(tensor)) if self.on_cuda else storage_nbytes(tensor)

    def scratch_nbytes(self, func: Any, args: tuple, kwargs: dict[str, Any], result: object) -> int:
        return call_scratch_nbytes(func, args, kwargs, result, self.num_threads, on_cuda=self.on_cuda)

    def step(self, label: str, scratch: int = 0) -> None:
        """Note a moment. Allocations before a kernel are the kernel's."""
        if label != ALLOCATION:
            for index in reversed(range(len(self.steps))):
                if self.steps[index].op != ALLOCATION:
                    break
                self.steps[index] = MemoryStep(label, "", self.steps[index].nbytes, self.position)
        self.steps.append(MemoryStep(label, "", sum(self.live.values()) + scratch, self.position))


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
            raise UnsupportedError(
                f"Inductor calls extern_kernels.{name}, whose memory chunkc does not know; "
                'compile with options={"codegen": "eager"}'
            )

        def call(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
            if out is None:
                return packet(*args, **kwargs)
            scratch = self._tracker.scratch_nbytes(packet.default, args, kwargs, out)
            self._tracker.step(f"aten.{name}", scratch)
            return out

        return call


def inductor_memory(
    source: str,
    example_inputs: Sequence[torch.Tensor],
    num_threads: int,
    made_by: Mapping[str, int] = MappingProxyType({}),
) -> SegmentMemory:
    """Memory of an Inductor-compiled segment, from the source of its generated wrapper.

    Args:
        made_by: names of buffers in the source -> which of the segment's operations makes them, as far as it is known.

    Raises:
        UnsupportedError: the wrapper uses something this reader does not know.
    """
    module = ast.parse(source)
    function = _call_function(module)
    kernels = set(_assigned_by_async_compile(module))
    on_cuda = computes_on_cuda(ast.unparse(function), example_inputs)
    with FakeTensorMode() as mode, _StorageTracker(num_threads, on_cuda) as tracker:
        args = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu" if on_cuda else t.device)
            if isinstance(t, torch.Tensor)
            else t
            for t in example_inputs
        ]
        tracker.steps.clear()
        tracker.live.clear()
        input_keys = [storage_key(t) if isinstance(t, torch.Tensor) else None for t in args]
        for index, tensor in enumerate(args):
            if isinstance(tensor, torch.Tensor):
                tracker.adopt_input(index, tensor)
            del tensor
        namespace = _wrapper_namespace(tracker)
        namespace.update({name: Kernel(name, tracker.step) for name in kernels})
        _refuse_unknown_names(function, namespace)
        namespace[AT] = tracker.at
        _mark_positions(function, made_by)
        exec(compile(ast.Module([function], []), "<inductor wrapper>", "exec"), namespace)
        tracker.step("start")
        outputs = namespace["call"](args)
        keys = [storage_key(t) for t in outputs if isinstance(t, torch.Tensor)]
        size = {storage_key(t): tracker.nbytes(t) for t in outputs if isinstance(t, torch.Tensor)}
        held = [None if k in tracker.input_released else key for k, key in enumerate(input_keys)]
        numbers, storages = _number_storages(keys, held, size)
        steps = tuple(tracker.steps)
        released = tuple(tracker.input_released.get(k, len(steps)) for k in range(len(input_keys)))
        del mode
    return SegmentMemory(steps, released, numbers, storages)


def _mark_positions(function: ast.FunctionDef, made_by: Mapping[str, int]) -> None:
    """Put `_chunkc_at(position)` before every statement that calls something, with its operation's position.

    What a statement makes is computed from the buffers it reads, so its operation is the last of all that are named.
    """
    for block in [node.body for node in ast.walk(function) if isinstance(node, ast.FunctionDef | ast.With)]:
        marked: list[ast.stmt] = []
        for statement in block:
            inside = list(ast.walk(statement))
            if any(isinstance(node, ast.Call) for node in inside) and not isinstance(statement, ast.With):
                names = [node.id for node in inside if isinstance(node, ast.Name)]
                position = max((made_by[name] for name in names if name in made_by), default=None)
                marked.append(ast.parse(f"{AT}({position})").body[0])
            marked.append(statement)
        block[:] = marked
    ast.fix_missing_locations(function)


def _call_function(module: ast.Module) -> ast.FunctionDef:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            node.args.args = [arg for arg in node.args.args if arg.arg != "self"]
            return node
    raise UnsupportedError("Inductor generated a wrapper without a `call` function")


def _assigned_by_async_compile(module: ast.Module) -> list[str]:
    names = []
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = node.value.func
            owner = called.value if isinstance(called, ast.Attribute) else None
            if isinstance(owner, ast.Name) and owner.id == "async_compile":
                names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return names


def _wrapper_namespace(tracker: _StorageTracker) -> dict[str, Any]:
    def empty_strided_cpu(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")

    def reinterpret_tensor(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "device": torch.device,
        "inf": float("inf"),
        "nan": float("nan"),
        "empty_strided_cpu": empty_strided_cpu,
        "reinterpret_tensor": reinterpret_tensor,
        "extern_kernels": _ExternKernels(tracker),
        "assert_size_stride": nothing,
        "assert_alignment": nothing,
        "inductor_ops": torch.ops.inductor,
        **(cuda_names() if tracker.on_cuda else {}),
    }


def _refuse_unknown_names(function: ast.FunctionDef, known: dict[str, Any]) -> None:
    bound = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {arg.arg for arg in function.args.args}
    read = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    unknown = sorted(read - bound - set(known) - {"None", "True", "False", "float", "int", "bool", "range", "len"})
    if unknown:
        raise UnsupportedError(
            f"Inductor's wrapper uses {', '.join(unknown)}, whose memory chunkc does not know; "
            'compile with options={"codegen": "eager"}'
        )
