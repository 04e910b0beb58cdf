"""Inductor: its options, compilation of a graph, and generation of a wrapper without compiling kernels."""

from __future__ import annotations

import functools
import inspect
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import preserve_rng_state
from torch._inductor import config, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache, PyCodeCache
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    _recursive_record_original_output_strides,
    compile_fx_inner,
    fake_tensor_prop,
    maybe_disable_comprehensive_padding,
)
from torch._inductor.cpp_builder import is_gcc
from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa, supported_vec_isa_list, x86_isa_checker
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
from torch._inductor.fx_passes import joint_graph
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.utils import shape_env_from_inputs
from torch._inductor.virtualized import V

from chunkc.torch_private.fake import TracingContext, detect_fake_mode, disable_current_modes
from chunkc.torch_private.kernel_batches import WaitingKernels, is_kernel_build
from chunkc.torch_private.ownership import is_own

__all__ = [
    "CppCodeCache",
    "CppCompileError",
    "InvalidCxxCompiler",
    "WaitingKernels",
    "compile_fx_inner",
    "is_gcc",
    "pick_vec_isa",
    "select_decomp_table",
]

MIN_RECURSION_LIMIT = 2000
"""Recursion limit that generating a wrapper raises Python's to, as Inductor does."""


_only_one = threading.RLock()
"""Held while functions of Inductor are replaced."""

_all_vector_isas = cpu_vec_isa.valid_vec_isa_list
"""Tries all vector instruction sets of the CPU, and returns those that work."""


def try_vector_isas() -> None:
    """Have Inductor try the CPU's vector instruction sets until one works, and not all of them.

    It takes the first that works, unless the user asks for another one; then it tries all as usual. For each a program
    is compiled, and loaded by a process of its own, which takes seconds.

    Raises:
        InvalidCxxCompiler: there is no C++ compiler.
    """
    if platform.machine() in ("x86_64", "AMD64") and cpu_vec_isa.valid_vec_isa_list is _all_vector_isas:
        flags = x86_isa_checker()
        on_cpu = (isa for isa in supported_vec_isa_list if all(flag in flags for flag in str(isa).split()))
        first = list(islice(filter(None, on_cpu), 1))

        def working() -> list[VecISA]:
            asked = config.cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ
            return _all_vector_isas() if asked else first

        cpu_vec_isa.valid_vec_isa_list = working  # type: ignore[assignment]


def has_others_patterns() -> bool:
    """Whether code of others is among the patterns that Inductor looks for in joint graphs."""
    passes = (joint_graph.early_patterns, *joint_graph.pass_patterns)
    entries = (entry for each in passes for found in each.patterns.values() for entry in found)
    return not all(is_own(getattr(entry, "handler", is_own)) and is_own(entry.extra_check) for entry in entries)


def patched(options: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Set options of Inductor inside the block."""
    return config.patch(dict(options))


def option(name: str) -> Any:
    """Return the current value of one of Inductor's options, such as "triton.cudagraphs"."""
    return functools.reduce(getattr, name.split("."), config)


def prepare_joint_graph(joint: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Apply Inductor's joint-graph passes, before the graph is partitioned.

    Inductor cannot compile random operators that these passes have not replaced.
    """
    with V.set_fake_mode(detect_fake_mode(example_inputs)):
        joint_graph_passes(joint)


def prepare_all_but_random(joint: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Apply `prepare_joint_graph` without the replacement of random operators, which `prepare_random` makes."""
    here = threading.get_ident()

    def replace_elsewhere(gm: fx.GraphModule) -> Any:
        return 0 if threading.get_ident() == here else replace(gm)  # other threads may compile meanwhile

    with _only_one:
        replace = joint_graph.replace_random_passes
        joint_graph.replace_random_passes = replace_elsewhere
        try:
            prepare_joint_graph(joint, example_inputs)
        finally:
            joint_graph.replace_random_passes = replace


def prepare_random(joint: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Replace a graph's random operators by Inductor's own, which take numbered seeds."""
    with V.set_fake_mode(detect_fake_mode(example_inputs)):
        if joint_graph.replace_random_passes(joint):
            stable_topological_sort(joint.graph)


def prepares_by_parts() -> bool:
    """Whether each pass of `prepare_joint_graph` looks at neighbouring operations only; a user's may look at all."""
    is_chunked = getattr(getattr(config, "auto_chunker", None), "enable", False)
    return not (is_chunked or config.joint_custom_pre_pass or config.joint_custom_post_pass)


def with_sizes_bound(inputs: Sequence[object]) -> AbstractContextManager[Any]:
    """Let code that is generated inside the block read symbolic sizes off its inputs.

    From PyTorch 2.14 on, it reads a size that is no input itself only to assert it, but uses the size in any case. So
    assertions are switched on there, whatever the user has set.
    """
    is_symbolic = any(isinstance(n, torch.SymInt) for t in inputs if isinstance(t, torch.Tensor) for n in t.shape)
    if is_symbolic and hasattr(PythonWrapperCodegen, "bind_input_symbol"):
        return config.patch(size_asserts=True)
    return nullcontext()


@contextmanager
def own_output_strides() -> Iterator[None]:
    """Keep the compilation of a segment from recording its output strides in the tracing context.

    The context expects the output strides of the whole graph.
    """
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
    """Return the source of the wrapper that `compile_fx_inner` made; "" if Inductor keeps none."""
    return getattr(compiled, "source_code", None) or ""


def generate_wrapper(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[str, dict[str, set[str]]]:
    """Generate the Python wrapper that `compile_fx_inner` makes for the CPU; compile no kernel. `module` is changed.

    The steps and their modes are those of `_InProcessFxCompile.codegen_and_compile` in
    `torch/_inductor/compile_fx.py`, which all versions checked share, without those for GPUs and the ahead-of-time
    compiler.

    Returns:
        The source; and name of each of its buffers -> names of the nodes that it comes from.
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
    """Return the argument by which a lowering finds decompositions; PyTorch 2.11 has none."""
    known = "get_decomp_fn" in inspect.signature(GraphLowering.__init__).parameters
    return {"get_decomp_fn": select_decomp_table} if known else {}


@contextmanager
def _surroundings() -> Iterator[None]:
    sys.setrecursionlimit(max(sys.getrecursionlimit(), MIN_RECURSION_LIMIT))
    with disable_current_modes(), DebugContext(), preserve_rng_state():
        yield


@dataclass(frozen=True)
class UnfinishedModule:
    """A Python module that Inductor generated and loaded; its C++ kernels may still be compiling."""

    _kernels: AsyncCompile
    _scope: dict[str, Any]

    def finish(self) -> None:
        """Wait for the kernels. A kernel that was not begun or has failed is compiled now, and its error is raised."""
        AsyncCompile.wait(self._kernels, self._scope)

    def forget(self) -> None:
        """Drop the module from Inductor's cache, so that it is loaded anew when it is next needed."""
        PyCodeCache.modules_no_attr.pop(self._scope["__file__"], None)


@contextmanager
def without_waiting(kernels: WaitingKernels) -> Iterator[list[UnfinishedModule]]:
    """Let Inductor load the modules that this thread generates without waiting for their C++ kernels.

    Yields the list of these modules. Code that was compiled inside the block may not run before all of them are
    finished; a module that never will be must be forgotten. C++ kernels that are not compiled yet join `kernels`.
    """
    unfinished: list[UnfinishedModule] = []
    here = threading.get_ident()
    wait, submit = AsyncCompile.wait, AsyncCompile.submit

    def wait_later(compilation: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == here:
            unfinished.append(UnfinishedModule(compilation, scope))
        else:
            wait(compilation, scope)

    def submit_kernel(task: Callable[[], None]) -> object:
        is_here = threading.get_ident() == here
        return kernels.add(task) if is_here and is_kernel_build(task) else submit(task)

    with _only_one:
        former = {name: vars(AsyncCompile)[name] for name in ("wait", "submit")}
        for name, function in (("wait", wait_later), ("submit", staticmethod(submit_kernel))):
            setattr(AsyncCompile, name, function)
        try:
            yield unfinished
        finally:
            for name, function in former.items():
                setattr(AsyncCompile, name, function)


def precompile_header() -> None:
    """Compile the header that every C++ kernel includes, or check it, as Inductor would for the first kernel.

    The first time on a machine this takes as long as several kernels. An error is dropped: the first kernel raises it.
    """
    with suppress(Exception):
        CppPythonBindingsCodeCache.load_pybinding_async([], 'extern "C" void kernel() {}')
