"""Models of equal layers, the graphs that are traced of a model, and as text all that is read of graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from chunkc.passes.graphs.graphs import placeholders, storage_key, tensors_of
from chunkc.passes.graphs.origins import origin_of
from chunkc.passes.rewrite.repeats import find_repeats
from chunkc.tracing.capture import TracedGraphs, capture_graph

WIDTH = 16
NUM_LAYERS = 7


class Block(nn.Module):
    def __init__(self, num_hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, num_hidden)
        self.down = nn.Linear(num_hidden, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.dropout(F.scaled_dot_product_attention(q * scale, k, v))
        return x + self.down(F.gelu(self.up(x)))


class Deep(nn.Module):
    """A model of layers that are alike unless `hidden` says otherwise; how it calls them is the variant's."""

    def __init__(self, variant: str = "", hidden: tuple[int, ...] = (32,) * NUM_LAYERS) -> None:
        super().__init__()
        self.variant = variant
        self.embedding = nn.Embedding(32, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.9))
        blocks = [Block(num_hidden, 0.1 if variant == "dropout" else 0.0) for num_hidden in hidden]
        self.blocks = nn.ModuleList(blocks[:1] * len(blocks) if variant == "one for all" else blocks)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        if variant == "tied":
            self.head.weight = self.embedding.weight
        if variant == "frozen":
            for block in blocks:
                block.up.requires_grad_(False)
        if variant == "batch norms":
            self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in blocks)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        states = []
        for number, block in enumerate(self.blocks):
            if self.variant == "checkpoints":
                x = checkpoint(block, x, self.scale, use_reentrant=False)
            else:
                x = block(x, self.scale)
            if self.variant == "batch norms":
                x = self.norms[number](x.mT).mT
            if self.variant == "counts":
                self.count.add_(1)
            states.append(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return (loss, states) if self.variant == "states" else loss


TOKENS = torch.arange(24).view(3, 8) % 7


def captured(model: nn.Module, *arguments: Tensor, codegen: str = "eager", **options: Any) -> tuple[TracedGraphs, int]:
    """The graphs of a model that is one graph, and how many of its blocks were found to be alike."""
    (found,) = all_captured(model, *arguments, codegen=codegen, options=options)
    return found


def all_captured(
    model: nn.Module, *arguments: Tensor, codegen: str = "eager", options: Any = None, **keywords: Any
) -> list[tuple[TracedGraphs, int]]:
    """As `captured`, of each of a model's graphs; `options` are `torch.compile`'s."""
    found: list[tuple[TracedGraphs, int]] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        repeats = find_repeats(gm.graph)
        names = [f"p{at}" if isinstance(value, nn.Parameter) else None for at, value in enumerate(inputs)]
        phases = dict.fromkeys(("run_forward", "run_backward"), lambda arguments: arguments)
        _, graphs = capture_graph(gm, inputs, names, codegen=codegen, **phases)
        found.append((graphs, 0 if repeats is None else len(repeats.blocks)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, **(options or {}))(*arguments, **keywords)
    return found


def size_of(tensor: Tensor) -> str:
    """Bytes of its storage, in which equal expressions are one text."""
    nbytes: Any = tensor.untyped_storage().nbytes()
    return str(nbytes if isinstance(nbytes, int) else sympy.expand(nbytes.node.expr))


def text(graphs: TracedGraphs) -> str:
    """All that anybody reads of two graphs: names, operators, forms, storages, marks, and the user's modules.

    Of names, those of inputs and of what is saved; the others say only in which order they are met, as those of copies
    of parameters' views depend on operations that the partitioner has dropped.
    """
    lines = [str(sorted(graphs.gradients.items()))]
    for module in (graphs.forward, graphs.backward):
        if module is not None:
            lines += [str([node.name for node in placeholders(module.graph)]), in_order(text_of(module.graph))]
    return "\n".join(lines)


def text_of(graph: fx.Graph) -> str:
    lines, storages = [], dict[int, int]()
    for node in graph.nodes:
        values = [
            (str(t.shape), t.dtype, str(t.stride()), storages.setdefault(storage_key(t), len(storages)),
             size_of(t), str(t.storage_offset()))
            for t in (tensors_of(node) if node.op != "output" else ())
        ]  # fmt: skip
        lines.append(f"{node.format_node()} {values} {origin_of(node)} {node.meta.get('custom')}")
    return "\n".join(lines)


def in_order(text: str) -> str:
    """With names that say only in which order they are met."""
    names = {name: f"%{at}" for at, name in enumerate(dict.fromkeys(re.findall(r"^%(\w+) :", text, re.MULTILINE)))}
    return re.sub(r"(?<![.\w])\w+", lambda match: names.get(match[0], match[0]), text)
