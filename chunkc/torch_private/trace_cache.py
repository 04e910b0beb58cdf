"""PyTorch's AOTAutogradCache: results of AOTAutograd by key, in Inductor's cache directory.

PyTorch has the runtime wrappers of a traced graph in an entry, and compiled code by way of an `OutputCode`. Here that
code is graphs, which chunkc plans (`Phase`). `torch.compiler.save_cache_artifacts()` takes the entries along.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor.output_code import OutputCode
from torch._library.utils import is_builtin
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from chunkc.torch_private.aot import are_graphs_logged
from chunkc.torch_private.fake import (
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    is_traceable_wrapper_subclass,
)
from chunkc.torch_private.ownership import is_own

Boxed = Callable[[list[Any]], list[Any]]

_SETTINGS = re.compile(r"_get_\w*(sdp|fastpath|cudnn|cublas|mkldnn|onednn|nnpack|deterministic|matmul|backend|cpu_)\w*")
"""Of `torch._C`: functions that return process-wide settings by which operators are chosen as they are traced."""

_RESTORE: ContextVar[Callable[[bytes], Boxed]] = ContextVar("restore")


class Phase(OutputCode):
    """A forward or backward of chunkc's in an entry: what runs it, and, in the forward, the graphs of both as bytes.

    Attributes:
        run: runs the phase; not part of the entry.
        content: for `restore` of `cached`; None: no entry can be written.
    """

    def __init__(self, run: Boxed, content: bytes | None) -> None:
        self._boxed_call = True  # of the object, from which PyTorch copies it to a function around it
        self.run: Boxed | None = run
        self.content = content
        self._time_taken_ns = 0  # PyTorch adds these up

    @torch.compiler.disable
    def __call__(self, inputs: Sequence[Any]) -> Any:
        assert self.run is not None
        return self.run(inputs)  # type: ignore[arg-type]

    def prepare_for_serialization(self) -> None:
        if self.content is None:
            raise autograd_cache.BypassAOTAutogradCache("the graphs cannot be written")
        self.run = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        assert self.content is not None
        self.run, self.content = _RESTORE.get()(self.content), None

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Do nothing: segments are kept by Inductor's own cache."""


def is_on() -> bool:
    """Whether entries are written and read: no option or log of the user is against it.

    With logs of graphs all is traced, so that they show the graphs that are planned.
    """
    return autograd_cache.should_use_local_autograd_cache() and not are_graphs_logged()


@contextmanager
def cached(gm: fx.GraphModule, facts: str, restore: Callable[[bytes], Boxed]) -> Iterator[None]:
    """Have AOTAutograd look up the graph that it is to trace inside the block, and keep what it returns.

    Args:
        facts: part of the entry's key, next to those that PyTorch adds.
        restore: called with the content of each phase of an entry that is found, the forward's first; returns what
            runs the phase. If it raises, the graph is traced.
    """
    for node in gm.graph.find_nodes(op="call_method"):
        for value in node.all_input_nodes:
            value.meta.setdefault("example_value", None)  # PyTorch looks for it, to see that a method is a tensor's
    gm.chunkc_facts = facts  # type: ignore[assignment]  # attributes of a graph are part of PyTorch's key
    token = _RESTORE.set(restore)
    try:
        with config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True):
            yield
    finally:
        _RESTORE.reset(token)
        del gm.chunkc_facts


def serializable(compiler: Callable[..., Phase]) -> Any:
    """Mark a forward's compiler as one of which AOTAutograd keeps results."""
    return SerializableAOTDispatchCompiler(Phase, compiler)


def process_state() -> str | None:
    """Describe what tracing depends on besides the graph and its inputs; None: on more than a key can hold.

    PyTorch's own key has some of it. The kernels of attention that are allowed, among others, it lacks.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    has_modes = _get_current_dispatch_mode_stack() or _get_current_function_mode_stack()
    if has_modes or hooks is not None or any(map(_is_traced_otherwise, torch.library._impls)):
        return None
    state = torch._C._dynamo.guards.GlobalStateGuard().__getstate__()
    switches = [torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(), torch.get_default_device()]
    einsum = torch.backends.opt_einsum
    return repr(
        (torch.__version__, state, switches, einsum.is_available(), einsum.enabled, einsum.strategy, _settings())
    )


def is_cacheable(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether a graph is all that its trace depends on, next to `process_state`.

    That is so of PyTorch's operators on inputs of fixed shapes. Operators of others are traced by code that may have
    changed since, and of a tensor in the graph a key would have the form alone.
    """
    plain = all(isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value) for value in inputs)
    return plain and all(
        not _is_foreign(node) and not _is_tensor(module, node)
        for module in gm.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )


def graphs_as_bytes(graphs: Sequence[fx.Graph]) -> bytes:
    """Return graphs with their nodes' notes as bytes.

    PyTorch's `GraphPickler` would do, but that it makes a storage as small as the first tensor in it.

    Raises:
        TypeError: a fake tensor has symbolic sizes, a known value, or no strides.
        Exception: a note cannot be pickled.
    """
    stream = io.BytesIO()
    _GraphPickler(stream).dump([(_nodes_of(graph), _names_of(graph)) for graph in graphs])
    return stream.getvalue()


def graphs_of_bytes(data: bytes, mode: FakeTensorMode) -> list[fx.Graph]:
    """Return what `graphs_as_bytes` was given, with fake tensors of a mode."""
    unpickler = _GraphUnpickler(io.BytesIO(data))
    unpickler.mode, unpickler.storages = mode, {}
    with disable_current_modes():
        return [_graph_of(nodes, names) for nodes, names in unpickler.load()]


def name_as(new: fx.Graph, graph: fx.Graph) -> None:
    """Have a copy of a graph name new nodes as the graph would."""
    _take_names(new, _names_of(graph))


class _GraphPickler(pickle.Pickler):
    """Pickles nodes: operators by name, and fake tensors as forms in numbered storages."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._storages: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch._ops.OpOverload):
            return _operator, (value.namespace, *value._schema.name.split("::")[1:], value._overloadname)
        if isinstance(value, torch._ops.HigherOrderOperator):
            return getattr, (torch.ops.higher_order, value.__name__)
        return NotImplemented

    def persistent_id(self, value: Any) -> Any:
        if value is torch.ops.higher_order:
            return "higher_order"
        if not isinstance(value, torch.Tensor):
            return None
        sizes = (*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
        if type(value) is not FakeTensor or value.constant is not None or not all(type(size) is int for size in sizes):
            raise TypeError(f"a tensor of {type(value).__name__} that is more than its form")
        storage = self._storages.setdefault(value.untyped_storage()._cdata, len(self._storages))
        form = (value.dtype, str(value.device), tuple(value.shape), value.stride(), value.storage_offset())
        return (storage, sizes[-1], value.requires_grad, *form)


class _GraphUnpickler(pickle.Unpickler):
    mode: FakeTensorMode
    storages: dict[int, torch.Tensor]

    def persistent_load(self, key: Any) -> Any:
        if key == "higher_order":
            return torch.ops.higher_order
        storage, nbytes, requires_grad, dtype, device, shape, stride, offset = key
        if storage not in self.storages:
            self.storages[storage] = torch.empty((nbytes,), dtype=torch.uint8, device="meta")
        values = torch.empty(0, dtype=dtype, device="meta")
        values.set_(self.storages[storage].untyped_storage(), offset, shape, stride)
        return FakeTensor(self.mode, values, torch.device(device)).requires_grad_(requires_grad)


def _operator(namespace: str, name: str, overload: str) -> torch._ops.OpOverload:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


@dataclass(frozen=True)
class _NodeNumber:
    """Stands for a node of a graph, by its number there."""

    at: int


def _nodes_of(graph: fx.Graph) -> list[tuple[Any, ...]]:
    number_of: dict[fx.Node, Any] = {node: _NodeNumber(at) for at, node in enumerate(graph.nodes)}

    def arguments(node: fx.Node) -> Any:
        return fx.map_arg((node.args, node.kwargs), number_of.__getitem__)

    return [(n.op, n.target, *arguments(n), n.name, n.type, n.meta) for n in graph.nodes]


def _names_of(graph: fx.Graph) -> tuple[Any, Any]:
    """Return the names that a graph has given, those of erased nodes too, and the last number of each."""
    return graph._graph_namespace._used_names, graph._graph_namespace._base_count


def _take_names(graph: fx.Graph, names: tuple[Any, Any]) -> None:
    graph._graph_namespace._used_names, graph._graph_namespace._base_count = map(copy, names)


def _graph_of(nodes: Sequence[tuple[Any, ...]], names: tuple[Any, Any]) -> fx.Graph:
    graph = fx.Graph()
    made: list[fx.Node] = []

    def value(argument: Any) -> Any:
        return made[argument.at] if isinstance(argument, _NodeNumber) else argument

    for op, target, args, kwargs, name, kind, meta in nodes:
        node = graph.create_node(op, target, name=name, type_expr=kind)
        node.args, node.kwargs = fx.node.map_aggregate((args, kwargs), value)
        node.meta = meta
        made.append(node)
    _take_names(graph, names)
    return graph


def _is_traced_otherwise(registered: str) -> bool:
    """Whether Python code that was registered for one of PyTorch's operators is run as that is traced."""
    return (
        registered.startswith("aten/") and re.search("/.*(Auto|Composite|Functional|Inplace)", registered) is not None
    )


def _settings() -> list[tuple[str, str]]:
    found = []
    for name in dir(torch._C):
        if _SETTINGS.fullmatch(name):
            try:
                found.append((name, str(getattr(torch._C, name)())))
            except (TypeError, RuntimeError):  # it takes arguments, or this build has no such setting
                continue
    return found


def _is_foreign(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(not is_builtin(getattr(target, name)) for name in target.overloads())
    if isinstance(target, torch._ops.OpOverload):
        return not is_builtin(target)
    return node.op == "call_function" and not is_own(target)


def _is_tensor(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "get_attr":
        return False
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return not isinstance(value, fx.GraphModule)
