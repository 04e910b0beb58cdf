"""Compute the loss of a language model in tiles of rows, so that its logits never exist as a whole.

In most models the logits are the largest values.

A row is a token. For each tile of rows, logits and their cross entropy are computed, and the backward computes that
tile's logits again right before it uses them (the tiles are marked as activation checkpoints, Chen et al.,
arXiv:1604.06174). Losses of tiles are added up in fp32. Liger's fused linear cross entropy does so by hand. So does
PyTorch's automatic chunker, which takes gradients before the loss's own gradient is known: in fp16 they would vanish.

It works on Dynamo's graph, where a cross entropy is one node. What stands between the logits' product and the loss may
change each element by a number (a cast, a cap), and shape or cut rows. Logits that have another reader, such as the
caller, are computed a second time for the loss: their gradient would be there twice else, in pieces and as a whole.
Where no such product is found, what follows is tiled.

The number of rows in a tile is the user's, or follows from the loss's shape alone (`AUTO`): tiles change the order of
sums, and no result may depend on the budget.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from chunkc.passes.graphs.graphs import TILE, tile_of
from chunkc.passes.graphs.symbols import hint
from chunkc.torch_private.aot import next_checkpoint_id
from chunkc.torch_private.dynamo import LINEAR, SWITCHES

AUTO: Final = "auto"

MANY_LOGITS = 2**28
"""Losses over more logits are tiled by themselves: in fp32 that is 1 GiB, of which a loss makes two or three."""

TILE_LOGITS = 2**26
"""At most so many logits are in a tile that the user has not chosen."""

_CASTS = frozenset({"float", "half", "bfloat16", "double", "to"})
_BY_ELEMENT = frozenset({torch.tanh, torch.mul, torch.div, operator.mul, operator.truediv, "tanh", "mul", "div"})
_SHAPING = frozenset({"view", "reshape", "flatten", "contiguous", torch.reshape, torch.flatten, operator.getitem})
_SIGNATURE = inspect.signature(F.cross_entropy)


@dataclass(frozen=True)
class _Chain:
    """The operations that lead to a loss: from `source` by `shaping`, then by `by_element`, in order.

    Attributes:
        linear: the product that makes the logits; `source` is its input then. None: it was not found.
    """

    source: fx.Node
    linear: fx.Node | None
    shaping: tuple[fx.Node, ...]
    by_element: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Losses:
    """Name the losses of a graph that are large enough for tiles: those in tiles, and those that stay whole.

    Attributes:
        tiled: of each loss that is computed in tiles, its name and its tiles.
        whole: of each that is computed whole, its name and the reason.
    """

    tiled: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()

    def without(self, others: Losses) -> Losses:
        """Return those that are not among the others."""
        return Losses(
            tuple(loss for loss in self.tiled if loss not in others.tiled),
            tuple(loss for loss in self.whole if loss not in others.whole),
        )


def tile_losses(graph: fx.Graph, rows: int | Literal["auto"]) -> Losses:
    """Compute each cross entropy of Dynamo's graph over more than `rows` rows in tiles of that many.

    With "auto", a cross entropy over more than `MANY_LOGITS` logits has tiles of at most `TILE_LOGITS`. It stays whole
    if the caller, or another operation, has its logits as well: they are in memory then, and tiles save little.
    Where the number of rows is a symbol, there are as many tiles as its present value asks for, of equal sizes.
    """
    tiled, whole = [], []
    for loss in graph.find_nodes(op="call_function", target=F.cross_entropy):
        if tile_of(loss) is not None:
            continue
        bound = _SIGNATURE.bind(*loss.args, **loss.kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        logits, target = arguments["input"], arguments["target"]
        rows_of_tile = _rows_of_tile(logits) if rows == AUTO else rows
        num_tiles = _num_tiles(logits, rows_of_tile)
        if num_tiles < 2:
            continue
        chain = _chain(logits)
        reason = _reason_against(arguments)
        if not reason and rows == AUTO and _is_read_elsewhere(chain, loss):
            reason = (
                "its logits have another reader, such as the caller, so tiles save little; loss_tile_rows="
                f"{rows_of_tile} makes them all the same"
            )
        if reason:
            whole.append(f"{loss.name}: {reason}")
            continue
        with graph.inserting_before(loss):
            total = _tiled(graph, loss, chain, target, arguments, rows_of_tile)
        total.meta = dict(loss.meta)
        loss.replace_all_uses_with(total)
        tiled.append(f"{loss.name}: {num_tiles} tiles of at most {rows_of_tile:,} rows")
        _erase(graph, loss)
    return Losses(tuple(tiled), tuple(whole))


def _num_tiles(logits: Any, rows: int) -> int:
    return -(-_shape(logits)[0] // rows)


def _rows_of_tile(logits: Any) -> int:
    """Return the rows of a tile that follow from the shape of the logits; all where they are not many."""
    num_rows, num_columns = _shape(logits)
    return max(1, num_rows if num_rows * num_columns <= MANY_LOGITS else TILE_LOGITS // num_columns)


def _shape(logits: Any) -> tuple[int, int]:
    """Return rows and columns of two-dimensional logits, symbols by their present values; (0, 0) of others."""
    value = logits.meta.get("example_value") if isinstance(logits, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return 0, 0
    return hint(value.shape[0]) or 0, hint(value.shape[1]) or 0


def _is_read_elsewhere(chain: _Chain, loss: fx.Node) -> bool:
    """Whether anything but the loss reads the logits or a shape of them."""
    path = {*chain.shaping, *chain.by_element, *(() if chain.linear is None else (chain.linear,)), loss}
    return any(reader not in path for node in path - {loss} for reader in node.users)


def _reason_against(arguments: Mapping[str, Any]) -> str:
    target = arguments["target"]
    value = target.meta.get("example_value") if isinstance(target, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 1:
        return "its targets are no class indices"
    if arguments["weight"] is not None:
        return "its classes have weights"
    if arguments["size_average"] is not None or arguments["reduce"] is not None:
        return "it uses size_average or reduce, which PyTorch has deprecated: use reduction"
    return ""


def _chain(logits: fx.Node) -> _Chain:
    """Return the operations that lead to two-dimensional logits, as far back as they can be computed by rows."""
    shaping: list[fx.Node] = []
    by_element: list[fx.Node] = []
    linear, node, switched = None, logits, _switched(logits.graph)
    while linear is None and switched[node] == switched[logits]:
        if _is_product(node):
            linear = node
        elif _is_by_element(node):
            by_element.append(node)
        elif _is_shaping(node):
            shaping.append(node)
        else:
            break
        node = node.all_input_nodes[0]
    return _Chain(node, linear, tuple(reversed(shaping)), tuple(reversed(by_element)))


def _switched(graph: fx.Graph) -> dict[fx.Node, int]:
    """Count how many times autocast or grad mode were switched before each node."""
    found, count = {}, 0
    for node in graph.nodes:
        count += node.op == "call_function" and node.target in SWITCHES
        found[node] = count
    return found


def _is_product(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not LINEAR or node.kwargs:
        return False
    value = node.args[0].meta.get("example_value") if isinstance(node.args[0], fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() >= 2


def _is_by_element(node: fx.Node) -> bool:
    """Whether a node casts to a dtype, or applies a number to all elements."""
    if len(node.all_input_nodes) != 1 or node.kwargs:
        return False
    others = [value for value in node.args if not isinstance(value, fx.Node)]
    if node.op == "call_method" and node.target in _CASTS:
        return node.target != "to" or (len(others) == 1 and isinstance(others[0], torch.dtype))
    return node.target in _BY_ELEMENT and all(isinstance(value, (int, float)) for value in others)


def _is_shaping(node: fx.Node) -> bool:
    """Whether a node puts rows into another shape, or cuts some off; each stays whole."""
    (source, *others) = node.args if node.args else (None,)
    if node.target not in _SHAPING or node.kwargs or len(node.all_input_nodes) != 1 or not isinstance(source, fx.Node):
        return False
    before, after = source.meta.get("example_value"), node.meta.get("example_value")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or after.dim() < 1:
        return False
    if not isinstance(before.shape[-1], int) or not isinstance(after.shape[-1], int):
        return False
    if before.shape[-1] != after.shape[-1] or before.dtype != after.dtype:
        return False
    if node.target is operator.getitem:
        return _cuts_rows(others[0], before.dim())
    return True


def _cuts_rows(index: object, num_dims: int) -> bool:
    """Whether an index consists of slices, and leaves the last dimension alone."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
        return False
    reaches_last = Ellipsis in parts or len(parts) == num_dims
    return not reaches_last or parts[-1] in (Ellipsis, slice(None))


def _tiled(
    graph: fx.Graph, loss: fx.Node, chain: _Chain, target: fx.Node, arguments: Mapping[str, Any], rows: int
) -> fx.Node:
    """Insert the tiled loss before the loss, and return its node."""
    shaped, logits = _shaped(graph, chain), arguments["input"]
    num_tiles = _num_tiles(logits, rows)
    sizes = _sizes(graph, shaped, logits.meta["example_value"].shape[0], num_tiles, rows)
    pieces, targets = (graph.call_function(torch.split, (whole, sizes)) for whole in (shaped, target))
    reduction = arguments["reduction"]
    losses = []
    for index in range(num_tiles):
        tile = _Tile(graph, (loss.name, index))
        value = graph.call_function(operator.getitem, (pieces, index))
        of_tile = graph.call_function(operator.getitem, (targets, index))
        if chain.linear is not None:
            value = tile.copy(chain.linear, {chain.source: value})
        for node in chain.by_element:
            value = tile.copy(node, {node.all_input_nodes[0]: value})
        options = {key: arguments[key] for key in ("ignore_index", "label_smoothing")}
        options["reduction"] = "none" if reduction == "none" else "sum"
        losses.append(tile.call(F.cross_entropy, (value, of_tile), options, loss))
    if reduction == "none":
        return graph.call_function(torch.cat, (losses,))
    dtype = loss.meta["example_value"].dtype
    if dtype.itemsize < torch.float32.itemsize:
        losses = [graph.call_method("float", (value,)) for value in losses]
    total = losses[0]
    for value in losses[1:]:
        total = graph.call_function(operator.add, (total, value))
    if reduction == "mean":
        counted = graph.call_function(operator.ne, (target, arguments["ignore_index"]))
        total = graph.call_function(operator.truediv, (total, graph.call_method("sum", (counted,))))
    return graph.call_method("to", (total, dtype))


def _shaped(graph: fx.Graph, chain: _Chain) -> fx.Node:
    """Insert the source in two dimensions, rows first, and return its node."""
    value = chain.source
    for node in chain.shaping:
        others = node.args[1:]
        if chain.linear is None or node.target is operator.getitem or "flatten" in str(node.target):
            value = graph.create_node(node.op, node.target, (value, *others))
        elif node.target != "contiguous":  # logits are contiguous, their source need not be
            sizes = others[0] if isinstance(others[0], (tuple, list)) else others
            width = chain.source.meta["example_value"].shape[-1]
            value = graph.call_method("reshape", (value, (*sizes[:-1], -1 if sizes[-1] == -1 else width)))
    return value


def _sizes(graph: fx.Graph, shaped: fx.Node, num_rows: int | torch.SymInt, num_tiles: int, rows: int) -> list[Any]:
    if isinstance(num_rows, int):
        return [rows] * (num_tiles - 1) + [num_rows - rows * (num_tiles - 1)]
    size = graph.call_method("size", (shaped, 0))
    each = graph.call_function(operator.floordiv, (size, num_tiles))
    others = graph.call_function(operator.mul, (each, num_tiles - 1))
    return [each] * (num_tiles - 1) + [graph.call_function(operator.sub, (size, others))]


class _Tile:
    """Adds nodes of one tile, which the backward computes again."""

    def __init__(self, graph: fx.Graph, mark: object) -> None:
        self._graph, self._mark, self._id = graph, mark, next_checkpoint_id()

    def copy(self, node: fx.Node, values: Mapping[fx.Node, fx.Node]) -> fx.Node:
        return self._marked(self._graph.node_copy(node, lambda n: values.get(n, n)), node)

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], like: fx.Node
    ) -> fx.Node:
        return self._marked(self._graph.call_function(function, tuple(args), dict(kwargs)), like)

    def _marked(self, node: fx.Node, like: fx.Node) -> fx.Node:
        kept = {key: value for key, value in like.meta.items() if key != "example_value"}
        custom = {**(kept.get("custom") or {}), TILE: self._mark}
        node.meta = {
            **kept, "custom": custom, "recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": self._id,
        }  # fmt: skip
        return node


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node without readers, and the nodes that only it has read."""
    before = [source for source in node.all_input_nodes if source.op != "placeholder"]
    graph.erase_node(node)
    for source in before:
        if not source.users and source in graph.nodes:
            _erase(graph, source)
