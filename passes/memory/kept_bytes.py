"""Keep the predicted bytes of segments from one process to the next.

A prediction depends on its segment, on the processor's instructions and threads, on settings of torch, and on the
versions of PyTorch and chunkc. An entry's key is a digest of all of that, and a prediction that depends on more is not
kept (`_key`). So a plan is the same with and without entries. An entry that is damaged, or that another key made, is
ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

import chunkc.ir
from chunkc.ir.program import Estimate, MemoryStep, SegmentMemory
from chunkc.machines.operators import operators_path
from chunkc.passes.graphs.graphs import is_compute, module_path, placeholders, tensors_of
from chunkc.passes.graphs.shapes import AS_TRACED, Shapes
from chunkc.passes.graphs.symbols import free_symbols
from chunkc.passes.memory.scratch.declared import any_declared
from chunkc.passes.memory.scratch.measured import is_recording
from chunkc.passes.segments.segments import canonical_text
from chunkc.torch_private import compile_cache, onednn
from chunkc.torch_private.aot import is_custom

MIN_NODES = 32
"""Operations of the smallest graph with bytes that are kept: of fewer, they are computed as soon as a file is read."""

_OF_TORCH = frozenset({"aten", "prims", "inductor", "mkldnn", "quantized", "_quantized"})
"""Namespaces of operators that PyTorch's version describes."""


def kept_bytes(
    graph: fx.Graph, code: str, num_threads: int, shapes: Shapes, compute: Callable[[], SegmentMemory]
) -> SegmentMemory:
    """Return what `compute` returns, from an entry if there is one; make the entry otherwise.

    Args:
        graph: the segment's.
        code: what is generated for it, with all that its bytes depend on besides inputs; "": it runs node by node.
    """
    key = _key(graph, code, num_threads) if _may_be_kept(shapes) else None
    if key is None:
        return compute()
    content = compile_cache.read(key)
    memory = _decoded(key, content)
    if memory is None:
        memory = compute()
        content = _encoded(key, memory)
        compile_cache.write(key, content)
    compile_cache.carry(key, content)
    return memory


def _may_be_kept(shapes: Shapes) -> bool:
    """Whether bytes are numbers that no function of the user's gives, and no caller records how they are made."""
    has_sources = _VERSIONS[-1] != _digest(())  # a program that was frozen into one file has none
    return has_sources and compile_cache.is_on() and shapes is AS_TRACED and not any_declared() and not is_recording()


def _key(graph: fx.Graph, code: str, num_threads: int) -> str | None:
    """Return a digest of all that a segment's bytes depend on; None if they depend on more.

    They do on custom operators, on constants, on graphs inside of operators, and on a GPU's libraries; and those of
    symbolic sizes are no numbers.
    """
    nodes = [node for node in graph.nodes if node.op != "output"]
    if code:
        # Inductor changes the graph that it compiles for the first time: of that, bytes of code depend on inputs alone.
        nodes = placeholders(graph)
        if not set(re.findall(r"\btorch\.ops\.(\w+)", code)) <= _OF_TORCH:
            return None
    elif sum(map(is_compute, nodes)) < MIN_NODES or any(map(_depends_on_more, nodes)):
        return None
    tensors = [tensor for node in nodes for tensor in tensors_of(node)]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    if next(free_symbols([node.meta.get("val") for node in nodes]), None) is not None:
        return None
    if not all(type(tensor.untyped_storage().nbytes()) is int for tensor in tensors):
        return None
    try:
        measured = operators_path().read_bytes()
    except FileNotFoundError:
        measured = b""
    except OSError:
        return None
    settings = (torch.get_float32_matmul_precision(), str(torch.get_default_dtype()))
    machine = (onednn.description(), torch.backends.cpu.get_cpu_capability(), str(num_threads))
    text = ("code", code, *map(_input_text, nodes)) if code else ("graph", *_graph_texts(graph))
    return _digest((*_VERSIONS, *machine, *settings, measured, *text))


def _depends_on_more(node: fx.Node) -> bool:
    return node.op == "get_attr" or isinstance(node.target, torch._ops.HigherOrderOperator) or is_custom(node)


def _input_text(node: fx.Node) -> str:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    return repr(value)


def _graph_texts(graph: fx.Graph) -> Iterator[str]:
    """Yield the operations of a graph with their storages, and the module of each."""
    yield canonical_text(graph)
    yield from map(module_path, graph.nodes)


def _digest(texts: Iterable[str | bytes]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode() if isinstance(text, str) else text
        digest.update(b"%d:" % len(content))
        digest.update(content)
    return digest.hexdigest()


def _sources(folders: Iterable[Path]) -> Iterator[bytes]:
    """Yield the content of each source in the folders, those behind links included."""
    for folder in folders:
        found = [Path(inside, name) for inside, _, names in os.walk(folder, followlinks=True) for name in names]
        yield from (path.read_bytes() for path in sorted(found) if path.suffix == ".py")


# Read as this module is imported: files that an upgrade replaces later are not those that this process runs.
_VERSIONS = (
    torch.__version__,
    str(torch.version.git_version),
    _digest(_sources([Path(str(chunkc.ir.__file__)).parents[1], Path(__file__).parents[1]])),
)
"""Versions of PyTorch, and a digest of chunkc's sources, those of its runtime and its kernels excepted."""


def _encoded(key: str, memory: SegmentMemory) -> list[str]:
    steps = [
        (s.op, s.module, s.nbytes, s.position, s.estimate and (s.estimate.operator, s.estimate.nbytes))
        for s in memory.steps
    ]
    text = json.dumps([steps, memory.input_released, memory.outputs, memory.storage_nbytes])
    return [_digest((key, text)), text]


def _decoded(key: str, content: object) -> SegmentMemory | None:
    """Return the memory that was encoded for this key; None if the content is anything else."""
    match content:
        case [str(digest), str(text)] if digest == _digest((key, text)):
            steps, *numbers = json.loads(text)
            return SegmentMemory(tuple(_steps(steps)), *map(tuple, numbers))
    return None


def _steps(steps: Iterable[Any]) -> Iterator[MemoryStep]:
    for op, module, nbytes, position, estimate in steps:
        yield MemoryStep(op, module, nbytes, position, estimate and Estimate(*estimate))
