"""Compile each distinct segment once, and read off what it will allocate."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.compiler import config as compiler_config

from chunkc.ir.errors import ChunkcError, UnsupportedError
from chunkc.ir.estimates import unread_wrapper
from chunkc.ir.program import SegmentMemory
from chunkc.passes.graphs.collectives import WAIT, Rendezvous, is_collective
from chunkc.passes.graphs.graphs import is_compute, op_name, output_node, placeholders, returned
from chunkc.passes.graphs.origins import origins
from chunkc.passes.graphs.shapes import AS_TRACED, Shapes, symbol_values
from chunkc.passes.memory.inductor.cuda import steady_inductor
from chunkc.passes.memory.inductor.memory import inductor_memory
from chunkc.passes.memory.inductor.wrapper_reader import UnreadableWrapper
from chunkc.passes.memory.inductor.wrapper_source import WrapperSource, wrapper_of
from chunkc.passes.memory.kept_bytes import kept_bytes
from chunkc.passes.memory.segment_memory import bounded_memory, eager_memory
from chunkc.passes.segments.alias_check import CheckedOnce
from chunkc.passes.segments.segments import Segment
from chunkc.torch_private.aot import is_custom
from chunkc.torch_private.inductor import (
    InvalidCxxCompiler,
    UnfinishedModule,
    WaitingKernels,
    compile_fx_inner,
    own_output_strides,
    pick_vec_isa,
    precompile_header,
    source_of,
    try_vector_isas,
    with_sizes_bound,
    without_waiting,
)

Show = Callable[[str, int, int | None], None]
"""As `chunkc.utils.progress.Show`."""

BoxedCallable = Callable[[list[Any]], Sequence[Any]]
"""Takes a list of inputs, which it empties, and returns the outputs."""


@functools.cache
def find_vector_isa() -> threading.Thread:
    """Let Inductor find out which vector instructions the C++ compiler can use, while the graph is traced.

    The first compilation in a new cache directory needs it, and would spend seconds waiting for the C++ compiler.
    Returns the thread; the answer is kept by Inductor. Where there is no compiler it is asked again, and says so,
    once a segment needs it.
    """

    def find() -> None:
        with suppress(InvalidCxxCompiler):
            try_vector_isas()
            pick_vec_isa()

    thread = threading.Thread(target=find, name="chunkc-vector-isa", daemon=True)
    thread.start()
    return thread


@functools.cache
def prepare_compiler() -> threading.Thread:
    """Let Inductor find out and compile what all kernels need, while the graph is traced; returns the thread."""

    def prepare() -> None:
        find_vector_isa().join()
        precompile_header()

    thread = threading.Thread(target=prepare, name="chunkc-compiler", daemon=True)
    thread.start()
    return thread


@dataclass(frozen=True)
class CompiledSegment:
    """A segment ready to run, and its memory.

    `wrapper`: what Inductor generated, None for a segment that runs node by node.
    """

    run: BoxedCallable
    memory: SegmentMemory
    wrapper: WrapperSource | None = None


def compile_segment(segment: Segment, codegen: str, num_threads: int, shapes: Shapes = AS_TRACED) -> CompiledSegment:
    """Compile by Inductor, or for `codegen="eager"` into a plain walk over the graph.

    Raises:
        UnsupportedError: Inductor cannot compile the segment, a size in it depends on data, or there is no C++
            compiler.
    """
    if _runs_node_by_node(segment, codegen):
        return CompiledSegment(EagerSegment(segment.module), _eager_memory_of(segment, num_threads, shapes))
    _require_compiler()
    prepare_compiler().join()
    inputs = segment.example_inputs
    with own_output_strides(), _configured(inputs), _cached_by_sizes(inputs), _failures_named(segment):
        compiled = compile_fx_inner(segment.module, inputs)
    wrapper = WrapperSource(source_of(compiled), {})
    run = CheckedOnce(compiled) if any(is_custom(node) for node in segment.module.graph.nodes) else compiled
    return CompiledSegment(run, _memory_of(segment, wrapper, num_threads, shapes), wrapper)


@contextmanager
def compiled_together(show: Show) -> Iterator[Callable[..., CompiledSegment]]:
    """Yield a `compile_segment` that does not wait for the C++ compiler, so that segments are lowered meanwhile.

    At the end of the block all kernels are compiled; until then no segment may run. Segments are lowered one after the
    other: Inductor's code generation is not known to be safe on several threads.

    Args:
        show: called with the number of segments with all kernels compiled.

    Raises:
        UnsupportedError: kernels cannot be compiled; also raised at the end of the block.
    """
    unfinished: list[tuple[Segment, UnfinishedModule]] = []
    kernels = WaitingKernels()

    def compile_one(segment: Segment, codegen: str, num_threads: int, shapes: Shapes = AS_TRACED) -> CompiledSegment:
        if not _has_cpp_kernels(segment, codegen):
            return compile_segment(segment, codegen, num_threads, shapes)
        with without_waiting(kernels) as modules:
            try:
                return compile_segment(segment, codegen, num_threads, shapes)
            finally:
                unfinished.extend((segment, module) for module in modules)

    num_finished = 0
    try:
        yield compile_one
        for segment, module in unfinished:
            show("compiling kernels", num_finished, len(unfinished))
            with _failures_named(segment):
                module.finish()
            num_finished += 1
    finally:
        for _, module in unfinished[num_finished:]:
            module.forget()
        kernels.give_up()


def _has_cpp_kernels(segment: Segment, codegen: str) -> bool:
    tensors = [value for value in segment.example_inputs if isinstance(value, torch.Tensor)]
    return not _runs_node_by_node(segment, codegen) and all(tensor.device.type == "cpu" for tensor in tensors)


def generated_wrapper(segment: Segment, codegen: str) -> WrapperSource | None:
    """Generate the wrapper of `compile_segment`'s result, without compiling; None for one that runs node by node.

    Raises:
        UnsupportedError: Inductor cannot compile the segment, or does not know yet which vector instructions it may
            use, and there is no C++ compiler to ask.
    """
    if _runs_node_by_node(segment, codegen):
        return None
    _require_compiler()
    with _configured(segment.example_inputs), _failures_named(segment):
        return wrapper_of(segment)


def describe_segment(
    segment: Segment,
    codegen: str,
    num_threads: int,
    shapes: Shapes = AS_TRACED,
    wrapper: WrapperSource | None = None,
) -> SegmentMemory:
    """Return the memory of `compile_segment`'s result, without compiling.

    Args:
        wrapper: the segment's wrapper, if it was generated before; with symbolic sizes it serves all sizes.

    Raises:
        UnsupportedError: Inductor cannot compile the segment, or does not know yet which vector instructions it may
            use, and there is no C++ compiler to ask; or a size in the segment depends on data.
    """
    if _runs_node_by_node(segment, codegen):
        return _eager_memory_of(segment, num_threads, shapes)
    wrapper = wrapper or generated_wrapper(segment, codegen)
    assert wrapper is not None
    return _memory_of(segment, wrapper, num_threads, shapes)


@contextmanager
def _failures_named(segment: Segment) -> Iterator[None]:
    """Say of which of the user's modules, and what to do.

    Raises:
        UnsupportedError: something went wrong inside, other than a lack of memory.
    """
    try:
        yield
    except (ChunkcError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        modules = dict.fromkeys(origin.module for origin in origins(segment.module.graph) if origin.module)
        operators = dict.fromkeys(op_name(node) for node in segment.module.graph.nodes if is_compute(node))
        reason = next(iter(str(error).strip().splitlines()), "")
        raise UnsupportedError(
            f"Inductor cannot compile {', '.join(modules) or 'the model'} ({', '.join(operators)}): "
            f'{type(error).__name__}: {reason}; compile with options={{"codegen": "eager"}}'
        ) from error


@contextmanager
def _configured(inputs: Sequence[object]) -> Iterator[None]:
    """Apply the user's settings of Inductor inside, but for those that bits, memory or symbolic sizes depend on."""
    with steady_inductor(inputs), with_sizes_bound(inputs):
        yield


def _require_compiler() -> None:
    find_vector_isa().join()
    try:
        pick_vec_isa()
    except InvalidCxxCompiler as error:
        raise UnsupportedError(
            "Inductor finds no C++ compiler, which its vector instructions depend on: install g++ or name one in "
            'the environment variable CXX, or choose codegen="eager"'
        ) from error


def _runs_node_by_node(segment: Segment, codegen: str) -> bool:
    nodes = segment.module.graph.nodes
    return codegen == "eager" or segment.run_by_aten or not any(is_compute(node) for node in nodes)


def _eager_memory_of(segment: Segment, num_threads: int, shapes: Shapes) -> SegmentMemory:
    graph = segment.module.graph
    return kept_bytes(graph, "", num_threads, shapes, partial(eager_memory, graph, num_threads, shapes))


def _memory_of(segment: Segment, wrapper: WrapperSource, num_threads: int, shapes: Shapes) -> SegmentMemory:
    graph, inputs = segment.module.graph, segment.example_inputs
    code = f"{wrapper.source}\n{sorted(wrapper.made_by.items())}"
    read_off = partial(inductor_memory, wrapper.source, inputs, num_threads, shapes, wrapper.made_by)
    try:
        memory = kept_bytes(graph, code, num_threads, shapes, read_off)
    except UnreadableWrapper as error:
        memory = bounded_memory(graph, num_threads, unread_wrapper(str(error)), shapes)
    assert len(memory.outputs) == sum(node is not None for node in returned(graph))
    return memory


def _cached_by_sizes(inputs: Sequence[object]) -> AbstractContextManager[Any]:
    """Let Inductor's cache tell apart for which sizes a segment with symbolic sizes was compiled.

    It does not by itself: the code holds for all sizes within its guards. But how Inductor fuses depends on the sizes
    at hand, and so do the bytes, which a description must find as they will be.
    """
    sizes = symbol_values(inputs)
    if not sizes:
        return nullcontext()
    tag = ",".join(f"{symbol}={value}" for symbol, value in sizes.items())
    return compiler_config.patch(  # type: ignore[attr-defined]
        cache_key_tag=f"{compiler_config.cache_key_tag} {tag}".strip()
    )


class EagerSegment:
    """Runs a segment node by node; every value is dropped right after its last reader."""

    def __init__(self, module: fx.GraphModule) -> None:
        graph = module.graph
        nodes = [node for node in graph.nodes if is_compute(node)]
        name = {node: f"v{i}" for i, node in enumerate([*placeholders(graph), *nodes])}
        last: dict[fx.Node, fx.Node] = {}
        for node in [*nodes, output_node(graph)]:
            for source in node.all_input_nodes:
                last[source] = node
        known: dict[str, Any] = {}
        lines = [f"[{', '.join(name[node] for node in placeholders(graph))}] = inputs", "inputs.clear()"]
        for node in nodes:
            dead = [name[source] for source in node.all_input_nodes if last[source] is node]
            if node not in last:
                dead.append(name[node])  # no node reads it
            lines.append(f"{name[node]} = {self._call(module, node, name, known)}")
            lines += [" = ".join([*dead, "None"])] if dead else []
        outputs = "".join(f"{name[node]}, " for node in returned(graph) if node is not None)
        code = "\n    ".join(["def run(inputs):", *lines, f"return ({outputs})"])
        exec(compile(code, "<chunkc segment>", "exec"), known)
        self._run = known["run"]

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self._run(inputs)
        return found

    def _call(self, module: fx.GraphModule, node: fx.Node, name: Mapping[fx.Node, str], known: dict[str, Any]) -> str:
        """Write a node as Python source; values without a literal go into `known`, under a name."""
        target = _literal(self._target(module, node), name, known)
        if node.op == "get_attr":
            return f"{target}()"
        arguments = [_literal(value, name, known) for value in node.args]
        arguments += [f"{key}={_literal(value, name, known)}" for key, value in node.kwargs.items()]
        return f"{target}({', '.join(arguments)})"

    def _target(self, module: fx.GraphModule, node: fx.Node) -> Callable[..., Any]:
        """Return the function that a node calls, wrapped if it is a collective or a custom operator."""
        target: Any = node.target
        if node.op == "get_attr":
            return _Constant(_attribute(module, target))
        if is_collective(node) and target is not WAIT:
            return Rendezvous(target)
        return CheckedOnce(target) if is_custom(node) else target


@dataclass(frozen=True)
class _Constant:
    value: object

    def __call__(self) -> object:
        return self.value


def _literal(value: Any, name: Mapping[fx.Node, str], known: dict[str, Any]) -> str:
    """Write an argument as Python source, nodes by their names."""
    if isinstance(value, fx.Node):
        return name[value]
    if isinstance(value, (list, tuple)):
        return "(" + "".join(f"{_literal(item, name, known)}, " for item in value) + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_literal(item, name, known)}" for key, item in value.items()) + "}"
    if value is None or type(value) in (bool, int):
        return repr(value)
    known[f"c{len(known)}"] = value
    return f"c{len(known) - 1}"


def _attribute(module: torch.nn.Module, path: str) -> object:
    value: object = module
    for part in path.split("."):
        value = getattr(value, part)
    return value
