"""Graphs traced from a few lines each, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from chunkc.passes.codegen import EagerSegment
from chunkc.passes.graphs.graphs import op_name, placeholders, returned
from chunkc.passes.segments.cuts import clone_parameter_views
from chunkc.passes.segments.segments import Piece

aten = torch.ops.aten


def trace(function, *args: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def ops(nodes: Sequence[fx.Node]) -> list[str]:
    return [op_name(node).removeprefix("aten.") for node in nodes]


def run_pieces(gm: fx.GraphModule, pieces: Sequence[Piece], args: Sequence[torch.Tensor]) -> list[object]:
    values: dict[fx.Node, object] = dict(zip(placeholders(gm.graph), args))
    for piece in pieces:
        results = EagerSegment(piece.segment.module)([values[node] for node in piece.inputs])
        values.update(zip(piece.outputs, results))
    return [values[node] for node in returned(gm.graph) if node is not None]


def mlp(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor]:
    for weight in weights:
        x = torch.relu(torch.mm(x, weight.t()))
    return (x,)


def mlp_graph(num_layers: int, width: int = 8) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    args = [torch.randn(4, width), *(torch.randn(width, width) for _ in range(num_layers))]
    gm = trace(mlp, *args)
    clone_parameter_views(gm.graph, placeholders(gm.graph)[1:])
    return gm, args


def blocks(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the last block's result, and what a backward would need."""
    saved = []
    for gain, up, down in zip(*[iter(weights)] * 3):
        scale = x.square().mean(-1, keepdim=True).rsqrt()
        hidden = torch.mm(x * scale * gain, up)
        wide = torch.relu(hidden)
        saved += [x, scale, hidden, wide]
        x = x + torch.mm(wide, down)
    return (x, *saved)


def blocks_graph(num_blocks: int) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    shapes = [(8,), (8, 32), (32, 8)] * num_blocks
    args = [torch.randn(4, 8), *(torch.randn(shape) for shape in shapes)]
    return trace(blocks, *args), args
