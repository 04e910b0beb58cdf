"""Keep what AOTAutograd and the partitioner make of a graph from one process to the next.

An entry has the forward and the backward as the partitioner left them: of equal blocks, few. Its key is Dynamo's graph,
the inputs' metadata, PyTorch's options, and the state and code that tracing depends on (`_facts`); a graph that
depends on more is traced each time. PyTorch keeps the entries, next to Inductor's compiled code
(`torch_private.trace_cache`).
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from inspect import getfile
from pathlib import Path
from typing import Any

import torch
from torch import fx

from chunkc.ir.errors import UnsupportedError
from chunkc.passes.graphs.graphs import copy_of, placeholders, returned
from chunkc.passes.rewrite.runner import Graphs, are_all_run_unchecked, run_passes
from chunkc.passes.rewrite.unrolling import JointNames
from chunkc.torch_private.aot import LazyGraphModule
from chunkc.torch_private.fake import TracingContext
from chunkc.torch_private.inductor import has_others_patterns
from chunkc.torch_private.ownership import is_own
from chunkc.torch_private.trace_cache import (
    Boxed,
    cached,
    graphs_as_bytes,
    graphs_of_bytes,
    is_cacheable,
    is_on,
    name_as,
    process_state,
)
from chunkc.tracing.autograd_checks import COMPILED_AUTOGRAD
from chunkc.tracing.decompositions import decompositions
from chunkc.tracing.passes import TraceContext

logger = logging.getLogger(__name__)

_ORIGINS = {name: name.removeprefix("fwd_") for name in ("nn_module_stack", "fwd_nn_module_stack", "stack_trace")}
"""A node's notes on modules and lines of the user's program -> those of Dynamo's nodes that they were taken from."""

_DROPPED = ("source_fn_stack", "fwd_source_fn_stack", "from_node", "torch_fn", "output_stack_traces")
"""Notes that nothing reads after the partition, and that name code as it was when the graph was traced."""

_SUM = "Gradient addition node"
"""With it begins the line that autograd adds to the stack of an operator to sum up gradients of its result."""

BACKWARD = b"backward"
"""A backward's content: its graph is in the forward's."""


@dataclass(frozen=True)
class Trace:
    """A traced graph, as an entry has it.

    Attributes:
        graphs: a forward and its backward as the partitioner left them, or a forward that has none.
        names: of the joint graph, if blocks are left to be unrolled.
        num_user_outputs, new_buffers: as of `TracedGraphs`.
    """

    graphs: Graphs
    names: JointNames | None
    num_user_outputs: int | None
    new_buffers: tuple[int, ...]


@dataclass
class Entry:
    """The cache's entry for one graph of Dynamo's, on the way to it or from it.

    Attributes:
        gm: the graph that AOTAutograd is given.
        whole: the same graph with all blocks.
        facts: see `_facts`.
    """

    gm: fx.GraphModule
    whole: fx.GraphModule
    facts: str
    _graphs: bytes | None = None
    _names: JointNames | None = None

    @staticmethod
    def of(gm: fx.GraphModule, whole: fx.GraphModule, inputs: Sequence[Any], context: TraceContext) -> Entry | None:
        """Return the entry for a graph; None if it is to be traced whatever the cache has."""
        if not is_on() or not are_all_run_unchecked() or TracingContext.try_get() is None:
            return None
        has_others_code = has_others_patterns() or not all(map(is_own, decompositions(context.codegen).values()))
        facts = _facts(gm, whole, inputs, context) if is_cacheable(gm, inputs) and not has_others_code else None
        return None if facts is None else Entry(gm, whole, facts)

    def looked_up(self, restore: Callable[[bytes], Boxed]) -> AbstractContextManager[None]:
        """Look the entry up as AOTAutograd is called inside the block (see `torch_private.trace_cache.cached`)."""
        return cached(self.gm, self.facts, restore)

    def keep(self, graphs: Graphs, names: JointNames | None) -> None:
        """Write graphs down as they are now; they are changed later."""
        self._names, origins = names, _origins(self.whole)
        try:
            self._graphs = graphs_as_bytes([_without_origins(gm.graph, origins) for gm in graphs])
        except Exception as error:  # of anything that nodes of other libraries may hold
            logger.info("the traced graph is not kept for later processes: %s", error)
            self._graphs = None

    def content(self, num_user_outputs: int | None, new_buffers: tuple[int, ...]) -> bytes | None:
        """Return the bytes from which `trace` makes the graphs again; None if they could not be written."""
        if self._graphs is None:
            return None
        data = pickle.dumps((self._graphs, self._names, num_user_outputs, new_buffers))
        self._graphs = None
        return hashlib.sha256(data).digest() + data

    def trace(self, content: bytes) -> Trace:
        """Return what `keep` and `content` were given, in the fake mode of this trace.

        Raises:
            ValueError: the content is damaged.
        """
        digest, data = content[:32], content[32:]
        if hashlib.sha256(data).digest() != digest:
            raise ValueError("the entry is damaged")
        graphs, names, num_user_outputs, new_buffers = pickle.loads(data)
        mode = TracingContext.get().fake_mode
        assert mode is not None
        nodes, modules = list(_nodes(self.whole)), []
        for graph in graphs_of_bytes(graphs, mode):
            modules.append(LazyGraphModule({}, graph))
            for node in graph.nodes:
                for note, at, more in node.meta.pop("origins"):
                    value = nodes[at].meta[_ORIGINS[note]]
                    node.meta[note] = value + more if more else value
        return Trace(tuple(modules), names, num_user_outputs, new_buffers)


def stand_in(backward: fx.Graph) -> fx.GraphModule:
    """Return a backward with the inputs and outputs of another for AOTAutograd, which writes its own into entries.

    Only compiled autograd would run it, which is refused.
    """
    graph = fx.Graph()
    inputs = [graph.node_copy(node) for node in placeholders(backward)]
    made = graph.call_function(_refuse, tuple(inputs))
    graph.output(tuple(None if result is None else made for result in returned(backward)))
    return fx.GraphModule({}, graph)


def _refuse(*inputs: Any) -> Any:
    raise UnsupportedError(COMPILED_AUTOGRAD)


def _facts(
    gm: fx.GraphModule, whole: fx.GraphModule, inputs: Sequence[torch.Tensor], context: TraceContext
) -> str | None:
    """Describe what the trace of a graph depends on besides its code; None: on more than a key can hold.

    PyTorch's key has the inputs' forms. It has not in which storages they are, nor whether they are leaves, on which
    AOTAutograd's view of changed inputs depends.
    """
    state, repeats = process_state(), context.repeats
    is_parameter = [name is not None for name in context.parameter_names]
    storages: dict[int, int] = {}
    first = [storages.setdefault(x.untyped_storage()._cdata, at) for at, x in enumerate(inputs)]
    shared = {of for at, of in enumerate(first) if of != at}
    if state is None or any(of in shared and not is_parameter[at] for at, of in enumerate(first)):
        return None
    blocks = None if repeats is None else (len(repeats.blocks), repeats.own)
    marks = [[str(node.meta[mark]) for mark in ("recompute", "custom") if mark in node.meta] for node in _nodes(gm)]
    origins = _origins(whole)
    notes = [[origins.get(key) for key in _notes(node)] for node in _nodes(whole)]
    of_inputs = (is_parameter, list(context.without_gradient), first, [(x.is_leaf, x.requires_grad) for x in inputs])
    return repr((_code(), state, of_inputs, context.num_outputs, context.codegen, blocks, marks, notes))


@cache
def _code() -> str:
    """Return a hash of the code that traces, partitions and writes graphs down."""
    tracing, torch_private, passes = (Path(getfile(each)) for each in (Entry, process_state, run_passes))
    digest = hashlib.sha256()
    for folder in (tracing.parent, torch_private.parent, passes.parents[1]):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of a graph and of those that it calls."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _origins(whole: fx.GraphModule) -> dict[tuple[str, Hashable], int]:
    """Map notes of Dynamo's nodes to the first node with each."""
    found: dict[tuple[str, Hashable], int] = {}
    for at, node in enumerate(_nodes(whole)):
        for key in _notes(node):
            if key[1]:
                found.setdefault(key, at)
    return found


def _notes(node: fx.Node) -> list[tuple[str, Hashable]]:
    return [(note, _hashable(node.meta.get(note))) for note in ("nn_module_stack", "stack_trace")]


def _without_origins(graph: fx.Graph, origins: dict[tuple[str, Hashable], int]) -> fx.Graph:
    """Copy a graph with origins as positions of Dynamo's nodes: modules and lines are those of the present process.

    Raises:
        LookupError: a node comes from elsewhere, or is a tensor that the graph has.
    """
    copy = copy_of(graph)
    for node in copy.nodes:
        if node.op == "get_attr":
            raise LookupError(f"{node} is a constant")
        notes = {note: node.meta.pop(note) for note in _ORIGINS if node.meta.get(note)}
        node.meta["origins"] = [_origin(note, value, origins) for note, value in notes.items()]
        for note in _DROPPED:
            node.meta.pop(note, None)
    name_as(copy, graph)
    return copy


def _origin(note: str, value: Any, origins: dict[tuple[str, Hashable], int]) -> tuple[str, int, str]:
    """Return a note's name, the position of Dynamo's node that it was taken from, and the text added to it since."""
    value, more = _hashable(value), ""
    if isinstance(value, str) and (note, value) not in origins:
        value, mark, line = value.partition(_SUM)
        more = mark + line
    return note, origins[_ORIGINS[note], value], more


def _hashable(note: Any) -> Hashable:
    return tuple(note.items()) if isinstance(note, dict) else note
