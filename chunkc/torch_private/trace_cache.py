"""PyTorch's AOTAutogradCache: results of AOTAutograd by key, in Inductor's cache directory (PyTorch 2.13 and later).

PyTorch has the runtime wrappers of a traced graph in an entry, and compiled code by way of an `OutputCode`. Here that
code is graphs, which chunkc plans (`Phase`). `torch.compiler.save_cache_artifacts()` takes the entries along.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor.output_code import OutputCode
from torch._library.utils import is_builtin
from torch._logging._internal import trace_log
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from chunkc.torch_private.fake import FakeTensorMode, is_traceable_wrapper_subclass

try:
    from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
    from torch.fx._graph_pickler import GraphPickler, Options
except ImportError:  # PyTorch 2.12 and earlier, of which some have parts of it
    SerializableAOTDispatchCompiler = None  # type: ignore[assignment, misc]

Boxed = Callable[[list[Any]], list[Any]]

HAS_CACHE = SerializableAOTDispatchCompiler is not None and all(
    hasattr(config, name) for name in ("bundled_autograd_cache", "force_non_lazy_backward_lowering")
)
"""Whether this PyTorch keeps what AOTAutograd returns for compilers that are not Inductor."""

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
    """Whether entries are written and read: PyTorch has the cache, and no option or log of the user is against it.

    With logs of graphs all is traced, so that they show the graphs that are planned.
    """
    return HAS_CACHE and autograd_cache.should_use_local_autograd_cache() and not trace_log.handlers


@contextmanager
def cached(gm: fx.GraphModule, facts: str, restore: Callable[[bytes], Boxed]) -> Iterator[None]:
    """Have AOTAutograd look up the graph that it is to trace inside the block, and keep what it returns.

    Args:
        facts: part of the entry's key, next to those that PyTorch adds.
        restore: called with the content of each phase of an entry that is found, the forward's first; returns what
            runs the phase. If it raises, the graph is traced.
    """
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
    return repr((torch.__version__, state, switches, einsum.is_available(), einsum.enabled, einsum.strategy, _settings()))


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


def graphs_as_bytes(content: object) -> bytes:
    """Return graph modules, in any structure, as bytes; raises where nodes or their notes cannot be."""
    return GraphPickler.dumps(content, Options(ops_filter=None, node_metadata_key_filter=None))


def graphs_of_bytes(data: bytes, mode: FakeTensorMode) -> Any:
    """Return what `graphs_as_bytes` was given, with fake tensors of a mode."""
    return GraphPickler.loads(data, mode)


def _is_traced_otherwise(registered: str) -> bool:
    """Whether Python code that was registered for one of PyTorch's operators is run as that is traced."""
    return registered.startswith("aten/") and re.search("/.*(Auto|Composite|Functional|Inplace)", registered) is not None


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
    module = inspect.getmodule(target) if node.op == "call_function" else None
    return module is not None and module.__name__.partition(".")[0] not in ("torch", "math", "_operator", "builtins")


def _is_tensor(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "get_attr":
        return False
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return not isinstance(value, fx.GraphModule)
