"""Graphs built by hand, and a store for them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from chunkc.ir import chunk_ops
from chunkc.ir.layout import ChunkGroup, ChunkLayout, ParamSpec, TensorSlice
from chunkc.ir.plan import EVICT, WRITE_BACK
from chunkc.runtime.device.tier import CpuTier
from chunkc.runtime.storage.arena import Arena
from chunkc.runtime.storage.homes import MemoryHome
from chunkc.runtime.store.store import ChunkStore

MIB = 1 << 20


WIDTH = 4


def make_store(*names: str) -> tuple[ChunkStore, dict[str, nn.Parameter]]:
    """Make a store of square parameters with the given names, one a group, filled with 1, 2, ..."""
    parameters = {name: nn.Parameter(torch.full((WIDTH, WIDTH), i + 1.0)) for i, name in enumerate(names)}
    groups = tuple(
        ChunkGroup(i, p.dtype, True, 64, (TensorSlice(ParamSpec(n, (WIDTH, WIDTH), (WIDTH, 1), p.dtype, True), 0),))
        for i, (n, p) in enumerate(parameters.items())
    )
    store = ChunkStore(ChunkLayout(0, (), ()), Arena(MemoryHome()), CpuTier(), debug=True)
    store.place(ChunkLayout(4096, groups, ()), parameters, frozenset())
    return store, parameters


class Builder:
    """A rewritten graph, node by node."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def event(self, kind: str, *chunks: str) -> None:
        for chunk in chunks:
            link = {EVICT: [], WRITE_BACK: ["to_home"]}.get(kind, ["to_device"])
            self.graph.call_function(chunk_ops.EVENT_TARGETS[kind], (chunk, *link))

    def fetch(self, *chunks: str) -> None:
        self.event("prefetch", *chunks)
        self.event("wait", *chunks)

    def put_back(self, chunk: str) -> None:
        for kind in ("write_back", "wait", "evict"):
            self.event(kind, chunk)

    def parameter(self, chunk: str, name: str) -> fx.Node:
        return self.graph.call_function(chunk_ops.parameter, (chunk, name))

    def call(self, segment: str, *arguments: fx.Node, num_outputs: int = 1) -> list[fx.Node]:
        node = self.graph.call_module(segment, arguments)
        node.meta["call"] = f"call_{segment}"
        return [self.graph.call_function(operator.getitem, (node, i)) for i in range(num_outputs)]

    def sink(self, name: str, chunk: str | None, gradient: fx.Node, owned: bool = True) -> None:
        self.graph.call_function(chunk_ops.sink, (name, chunk, gradient, owned))


def boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """Make a segment, which empties its list and returns a tuple."""

    def call(arguments: list[Any]) -> Sequence[Any]:
        values = tuple(arguments)
        arguments.clear()
        result = function(*values)
        return result if isinstance(result, tuple) else (result,)

    return call
