"""Answer small questions about an ATen FX graph: a node's storages, bytes, user module and parameter names."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from chunkc.passes.graphs.cuda_memory import rounded_nbytes
from chunkc.torch_private.aot import LazyGraphModule


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the fake tensors that a node produced while it was traced (empty for symbols and None)."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):  # nearly always, and called for every node many times
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key of the storage within one graph; meaningless outside it."""
    return tensor.untyped_storage()._cdata


def storage_keys(node: fx.Node) -> list[int]:
    return [storage_key(tensor) for tensor in tensors_of(node)]


def storage_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes that the tensor's storage takes of its allocator: on CUDA devices rounded up."""
    nbytes = int(tensor.untyped_storage().nbytes())
    return rounded_nbytes(nbytes) if tensor.device.type == "cuda" else nbytes


def copy_of(graph: fx.Graph) -> fx.Graph:
    """Copy a graph, so that the copy may be changed."""
    copy = fx.Graph()
    results = copy.graph_copy(graph, {})
    copy.output(results).meta = dict(output_node(graph).meta)
    return copy


def is_compute(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_module", "call_method", "get_attr")


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def is_view_of(node: fx.Node, base_keys: Collection[int]) -> bool:
    """Whether all results of a node live in the given storages."""
    keys = storage_keys(node)
    return is_compute(node) and bool(keys) and all(key in base_keys for key in keys)


CLONES_OF_WHOLE_STORAGES = frozenset(
    {
        torch.ops.aten.copy.default,
        torch.ops.aten.slice_scatter.default,
        torch.ops.aten.select_scatter.default,
        torch.ops.aten.diagonal_scatter.default,
        torch.ops.aten.as_strided_scatter.default,
    }
)
"""Operators with a result that is a view of a copy of their first argument's whole storage."""

_CONSTANTS = frozenset(
    {
        torch.ops.aten.arange.start_step,
        torch.ops.aten.full.default,
        torch.ops.aten.ones.default,
        torch.ops.aten.scalar_tensor.default,
        torch.ops.aten.zeros.default,
        torch.ops.prims.iota.default,
    }
)


def is_constant(node: fx.Node) -> bool:
    """Whether a node makes a tensor of numbers alone, which only its readers see, and none changes.

    AOTAutograd makes equal ones once, such as the zeros into which every block's backward writes a slice's gradient.
    """
    if node.target not in _CONSTANTS:
        return False
    keys = storage_keys(node)
    return all(_only_reads(user) and not is_view_of(user, keys) for user in node.users)


def _only_reads(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable


def output_node(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


def returned(graph: fx.Graph) -> list[fx.Node | None]:
    """Return the outputs of a graph, flat: a node, or None for an empty output."""
    (values,) = output_node(graph).args
    assert isinstance(values, (tuple, list))
    return [value if isinstance(value, fx.Node) else None for value in values]


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


def op_name(node: fx.Node) -> str:
    """Return `aten.mm` for an ATen overload, the target's own name otherwise."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return f"{namespace}.{name}"
    return str(getattr(target, "__name__", target))


_VIA_DICT = re.compile(r"\.__dict__\['(_modules|_parameters|_buffers)'\]")
"""Dynamo's read of a submodule, parameter or buffer of a class with its own `__getattr__`."""

_ATTRIBUTE = re.compile(r"\.?_(?:modules|parameters|buffers)\['([^']+)'\]|\.(\w+)|\[(\d+)\]")


@lru_cache(maxsize=4096)
def source_path(source: str) -> tuple[str, str]:
    """Split Dynamo's source expression into the variable it begins with, and the user's name from there on.

    `L['self']._modules['h']._modules['0']._parameters['weight']` is `h.0.weight` of `L['self']`.
    """
    source = _VIA_DICT.sub(r".\1", source)
    head = re.match(r"^[LG]\['[^']*'\]", source)
    variable = head[0] if head else ""
    parts = [a or b or c for a, b, c in _ATTRIBUTE.findall(source[len(variable) :])]
    return variable, ".".join(part for part in parts if part not in ("_modules", "_parameters", "_buffers"))


def attribute_path(source: str) -> str:
    """Return the user's name for Dynamo's source expression, without the variable it begins with."""
    return source_path(source)[1]


def module_path(node: fx.Node) -> str:
    """Return the innermost user module that a node was traced in; "" if the trace does not say."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return attribute_path(path) if path.startswith(("L[", "G[")) else str(path)


def input_nodes_in_order(nodes: list[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes that `nodes` read from outside, each once, in order of first use."""
    inside, yielded = set(nodes), set()
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside and source not in yielded:
                yielded.add(source)
                yield source


def without_tied_placeholders(gm: fx.GraphModule, tied: Mapping[int, int]) -> fx.GraphModule:
    """Return the graph with tied inputs merged: `tied` maps a placeholder's position to its replacement's."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, values))
    copied = [values[node] for node in placeholders(gm.graph)]
    for position, replacement in tied.items():
        copied[position].replace_all_uses_with(copied[replacement])
        graph.erase_node(copied[position])
    return LazyGraphModule(gm, graph)


def value_of(node: fx.Node) -> Any:
    """Return the fake value of a node. If tracing noted none for a tuple, it is put together from its items."""
    if "val" in node.meta or node.op == "output":
        return node.meta.get("val")
    items: dict[Any, fx.Node] = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if not items:
        return None
    return tuple(value_of(items[i]) if i in items else None for i in range(1 + max(items)))


TILE = "chunkc_loss_tile"
"""Key in a node's `meta["custom"]` of the tile that it computes. `cuts.cut` begins a segment with each."""


def tile_of(node: fx.Node) -> object:
    """Return the tile of a loss that a node computes; None: none, or not known."""
    return (node.meta.get("custom") or {}).get(TILE)
