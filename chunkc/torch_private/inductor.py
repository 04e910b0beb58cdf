"""Inductor: how it is configured, compiles a graph, and generates a wrapper without compiling."""

from __future__ import annotations

import functools
import inspect
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import preserve_rng_state
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache, PyCodeCache, _worker_compile_cpp
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    _recursive_record_original_output_strides,
    compile_fx_inner,
    fake_tensor_prop,
    maybe_disable_comprehensive_padding,
)
from torch._inductor.cpu_vec_isa import pick_vec_isa, supported_vec_isa_list, x86_isa_checker
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
from torch._inductor.fx_passes import joint_graph
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.utils import shape_env_from_inputs
from torch._inductor.virtualized import V

from chunkc.torch_private.fake import TracingContext, detect_fake_mode, disable_current_modes

__all__ = [
    "CppCodeCache",
    "CppCompileError",
    "InductorError",
    "InvalidCxxCompiler",
    "compile_fx_inner",
    "pick_vec_isa",
    "select_decomp_table",
]

MIN_RECURSION_LIMIT = 2000
"""Depth of the Python stack that Inductor makes room for."""


_only_one = threading.RLock()
"""Held while Inductor does less than it would."""


def try_vector_isas() -> None:
    """Try the CPU's vector instructions side by side. `pick_vec_isa`, which keeps the answers, takes them in turn: each
    is compiled, and loaded by a process of its own, which takes seconds.

    Raises:
        InvalidCxxCompiler: there is no C++ compiler.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        flags = x86_isa_checker()
        found = [isa for isa in supported_vec_isa_list if all(flag in flags for flag in str(isa).split())]
        with ThreadPoolExecutor(max(1, len(found))) as pool:
            list(pool.map(bool, found))


def patched(options: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Inductor's options inside."""
    return config.patch(dict(options))


def option(name: str) -> Any:
    """The current value of one of Inductor's options, such as "triton.cudagraphs"."""
    return functools.reduce(getattr, name.split("."), config)


def prepare_joint_graph(joint: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Apply Inductor's joint-graph passes before the graph is partitioned; without it random numbers cannot be
    compiled."""
    with V.set_fake_mode(detect_fake_mode(example_inputs)):
        joint_graph_passes(joint)


def prepare_all_but_random(joint: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """`prepare_joint_graph` up to its last step, which is `prepare_random`."""
    here = threading.get_ident()

    def replace_elsewhere(gm: fx.GraphModule) -> Any:
        return 0 if threading.get_ident() == here else replace(gm)

    with _only_one:
        replace = joint_graph.replace_random_passes
        joint_graph.replace_random_passes = replace_elsewhere
        try:
            prepare_joint_graph(joint, example_inputs)
        finally:
            joint_graph.replace_random_passes = replace


def prepare_random(joint: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Numbers the random numbers of a graph, as Inductor does."""
    with V.set_fake_mode(detect_fake_mode(example_inputs)):
        if joint_graph.replace_random_passes(joint):
            stable_topological_sort(joint.graph)


def prepares_by_parts() -> bool:
    """Whether `prepare_joint_graph` looks at operations that are near each other only; users' passes may at all."""
    is_chunked = getattr(getattr(config, "auto_chunker", None), "enable", False)
    return not (is_chunked or config.joint_custom_pre_pass or config.joint_custom_post_pass)


def with_sizes_bound(inputs: Sequence[object]) -> AbstractContextManager[Any]:
    """Code that is generated inside reads symbolic sizes off its inputs.

    From PyTorch 2.14 on it reads them only to assert them, where no input is the size itself, and uses them all the
    same. So there they are asserted, whatever the user has set.
    """
    is_symbolic = any(isinstance(n, torch.SymInt) for t in inputs if isinstance(t, torch.Tensor) for n in t.shape)
    if is_symbolic and hasattr(PythonWrapperCodegen, "bind_input_symbol"):
        return config.patch(size_asserts=True)
    return nullcontext()


@contextmanager
def own_output_strides() -> Iterator[None]:
    """Keep a segment's output strides away from the tracing context, which expects those of the whole graph."""
    context = TracingContext.try_get()
    if context is None:
        yield
        return
    former, context.output_strides = context.output_strides, None
    try:
        yield
    finally:
        context.output_strides = former


def source_of(compiled: object) -> str:
    """The wrapper of what `compile_fx_inner` made; "" where Inductor keeps none."""
    return getattr(compiled, "source_code", None) or ""


def generate_wrapper(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[str, dict[str, set[str]]]:
    """The Python wrapper that `compile_fx_inner` generates for the CPU; no kernel is compiled, and `module` is changed.

    The steps, and the modes they run in, are those of `_InProcessFxCompile.codegen_and_compile` in
    `torch/_inductor/compile_fx.py`, the same in all versions checked, less what only GPUs and the ahead-of-time
    compiler need.

    Returns:
        The source, and the names of its buffers -> names of the nodes that each one comes from.
    """
    with _surroundings():
        shape_env = shape_env_from_inputs(inputs)
        view_to_reshape(module)
        with torch.no_grad():
            fake_mode = fake_tensor_prop(module, inputs)
        _recursive_record_original_output_strides(module)
        with V.set_fake_mode(fake_mode):
            _recursive_post_grad_passes(module, is_inference=False)
        with V.set_fake_mode(fake_mode), maybe_disable_comprehensive_padding(inputs):
            lowering = GraphLowering(
                module, example_inputs=inputs, shape_env=shape_env, inputs_to_check=[], **_decompositions()
            )
            lowering.freeze_runtime_asserts()
            with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
                lowering.run(*inputs)
                wrapper, _ = lowering.codegen()
    return wrapper.value, {b.get_name(): {node.name for node in b.origins} for b in lowering.buffers}


def _decompositions() -> dict[str, Any]:
    """From PyTorch 2.12 on, a lowering is told where to find them."""
    known = "get_decomp_fn" in inspect.signature(GraphLowering.__init__).parameters
    return {"get_decomp_fn": select_decomp_table} if known else {}


@contextmanager
def _surroundings() -> Iterator[None]:
    sys.setrecursionlimit(max(sys.getrecursionlimit(), MIN_RECURSION_LIMIT))
    with disable_current_modes(), DebugContext(), preserve_rng_state():
        yield


@dataclass(frozen=True)
class UnfinishedModule:
    """A module that Inductor generated and loaded; its C++ kernels may still be compiling."""

    _kernels: AsyncCompile
    _scope: dict[str, Any]

    def finish(self) -> None:
        """Wait for the kernels. One that was not begun, or failed, is compiled now, and raises here."""
        AsyncCompile.wait(self._kernels, self._scope)

    def forget(self) -> None:
        """Let Inductor load the module anew where it is asked for it again."""
        PyCodeCache.modules_no_attr.pop(self._scope["__file__"], None)


@contextmanager
def without_waiting(is_over: threading.Event) -> Iterator[list[UnfinishedModule]]:
    """Inside, Inductor loads what it generates on this thread without waiting for the C++ kernels in it.

    Gives a list of what it would have waited for. Nothing that was compiled inside may run before all of it is
    finished; what never will be is to be forgotten. Once `is_over` is set, no kernel is begun any more.
    """
    unfinished: list[UnfinishedModule] = []
    here = threading.get_ident()
    wait, submit = AsyncCompile.wait, AsyncCompile.submit

    def wait_later(kernels: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == here:
            unfinished.append(UnfinishedModule(kernels, scope))
        else:
            wait(kernels, scope)

    def submit_while_wanted(task: Callable[[], None]) -> object:
        if getattr(task, "func", None) is not _worker_compile_cpp:
            return submit(task)
        return submit(functools.partial(_compile_if_wanted, task, is_over))

    with _only_one:
        former = {name: vars(AsyncCompile)[name] for name in ("wait", "submit")}
        for name, function in (("wait", wait_later), ("submit", staticmethod(submit_while_wanted))):
            setattr(AsyncCompile, name, function)
        try:
            yield unfinished
        finally:
            for name, function in former.items():
                setattr(AsyncCompile, name, function)


def _compile_if_wanted(compile_kernel: Callable[[], None], is_over: threading.Event) -> None:
    # A caller that needs the kernel calls this again: it does nothing if the kernel is there, else raises why it
    # failed.
    if not is_over.is_set():
        with suppress(Exception):
            compile_kernel()


def precompile_header() -> None:
    """Let Inductor compile, or check, the header that every C++ kernel includes, as it would for the first kernel.

    Once on a machine this takes as long as several kernels. Where it fails, the first kernel's compilation says why.
    """
    with suppress(Exception):
        CppPythonBindingsCodeCache.load_pybinding_async([], 'extern "C" void kernel() {}')
