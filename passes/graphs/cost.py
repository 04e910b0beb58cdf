"""Estimate the seconds of a run of operations by a two-term roofline: arithmetic of matrix products, bytes of the rest.

Collectives take the time of their links in addition. Floating-point operations come from PyTorch's own counter
(`torch.utils.flop_counter`), and for operators it does not know from the table here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from chunkc.ir.hardware import Hardware
from chunkc.passes.graphs.collectives import exchange_of
from chunkc.passes.graphs.graphs import tensors_of
from chunkc.passes.graphs.shapes import AS_TRACED, Shapes

aten = torch.ops.aten


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward_flops(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kw: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _grouped_flops(left: Tensor, right: Tensor, *rest: Any, **kwargs: Any) -> int:
    """Count matrix products of groups of rows: each row is multiplied by one matrix, whatever the groups' sizes.

    Two plain matrices (then the groups divide their inner dimension) count as one product.
    """
    rows, inner = left.shape[-2], left.shape[-1]
    return 2 * rows * inner * right.shape[-1]


_FLOPS: Mapping[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    aten._grouped_mm: _grouped_flops,
}


def is_product(node: fx.Node) -> bool:
    """Whether a node is a matrix product, attention or a convolution."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet is not None and (packet in _FLOPS or packet in flop_registry)


def node_flops(node: fx.Node, shapes: Shapes = AS_TRACED) -> int:
    """Return the floating-point operations of a node's matrix products, attention and convolutions, else 0."""
    if not is_product(node):
        return 0
    packet: Any = node.target.overloadpacket  # type: ignore[union-attr]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    args, kwargs, value = shapes.of((args, dict(kwargs), node.meta.get("val")))
    if packet in _FLOPS:
        return _FLOPS[packet](*args, **kwargs)
    return flop_registry[packet](*args, **kwargs, out_val=value)


def cost_s(nodes: Sequence[fx.Node], hardware: Hardware, shapes: Shapes = AS_TRACED) -> float:
    """Return the seconds of the nodes.

    Operations count at the matrix rate, results at the memory's rate, and exchanges at the rate of the link between the
    devices of a layer.
    """
    flops = torch.sym_sum([node_flops(node, shapes) for node in nodes])
    nbytes = torch.sym_sum([t.numel() * t.itemsize for node in nodes for t in map(shapes.of, tensors_of(node))])
    exchanges = [exchange for node in nodes if (exchange := exchange_of(node, hardware, shapes)) is not None]
    alone_s = shapes.known_s(flops / hardware.flops_per_s + nbytes / hardware.memory_bytes_per_s)
    return alone_s + sum(exchange.seconds(hardware) for exchange in exchanges)
